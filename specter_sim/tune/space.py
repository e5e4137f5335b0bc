"""The systems that are possible under a budget: what combines, what fits, what cannot win."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from specter_sim.config import RunConfig, Table, build
from specter_sim.hardware import find_model
from specter_sim.hardware.forms import DRAFT_BITS, REFINEMENT_SHARE
from specter_sim.policies import EVICTION, PREFETCH
from specter_sim.setup import resolve, whole_trace
from specter_sim.setup.memory import machine_of
from specter_sim.setup.text import served_sequences
from specter_sim.tune.allocation import allocate, saved_loads
from specter_sim.tune.choice import (
    MARGINAL,
    NEVER,
    SHARED,
    UNIFORM,
    Choice,
    configured,
    settled,
    with_part,
    without_choices,
)
from specter_sim.units import format_bytes
from specter_traces import Trace
from specter_traces.errors import UsageError

TUNING, HELD_OUT, ALL = "even", "odd", "all"
DEEPEST = 16
# A seeded rule wins or loses by its seed; layers stream only through one pool for all of them.
_LEFT_OUT = {"random", "stream"}
_CODINGS = ("plain", "coded", "coded-base")

Footing = tuple[str, int | None, bool, str]  # coding, draft bits, drafts, demand


@dataclass(frozen=True)
class Room:
    """What fits beside everything else: slots in each layer, and in all of them together."""

    each: int
    total: int


class Space:
    """Every choice that can run within the budget, over what the base configuration fixes.

    Raises UsageError when nothing fits (naming the smallest budget that works) or when there is no
    second half to check on.
    """

    def __init__(self, base: RunConfig, budget_bytes: int) -> None:
        self.base, self.budget_bytes = base, budget_bytes
        self.shape = find_model(base.model)
        self._table = without_choices(base)
        self._rooms: dict[Footing, Room | str] = {}
        self._slots: dict[int, tuple[int, ...] | None] = {}
        self.trace = whole_trace(base, self.shape)
        self._check_halves()
        self.bits = self._recorded_bits()
        self.values = self._values()
        self._check_room()

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not searched, and why."""
        told: list[str | None] = [_draft_note(self.base, self.trace, self.bits)]
        reasons = (room for room in self._rooms.values() if isinstance(room, str))
        told += [reason for reason in reasons if "does not fit" not in reason]
        memory_bytes = machine_of(self.base).gpu.memory_bytes
        if self.budget_bytes > memory_bytes:
            told.append(f"the budget is more than the {format_bytes(memory_bytes)} of the machine")
        return tuple(dict.fromkeys(note for note in told if note))

    @property
    def left_out(self) -> list[str]:
        """Why some codings, drafts or ways to demand are not possible, one line each."""
        return [
            f"{_told(key)}: {room}" for key, room in self._rooms.items() if isinstance(room, str)
        ]

    def choices(self) -> Iterator[Choice]:
        """Every possible choice, the simpler ones first."""
        for values in itertools.product(*self.values.values()):
            choice = Choice(**dict(zip(self.values, values, strict=True)))
            if self.has(choice):
                yield choice

    def order(self, choice: Choice) -> tuple[int, ...]:
        """Sorts choices as ``choices`` lists them."""
        return tuple(self._places[name, getattr(choice, name)] for name in self.values)

    @cached_property
    def _places(self) -> dict[tuple[str, Any], int]:
        return {
            (name, value): place
            for name, values in self.values.items()
            for place, value in enumerate(values)
        }

    @cached_property
    def size(self) -> int:
        """How many choices there are."""
        return sum(1 for _ in self.choices())

    def has(self, choice: Choice) -> bool:
        """Whether a choice combines, fits, and is not another one in disguise."""
        if any(getattr(choice, name) not in values for name, values in self.values.items()):
            return False
        if choice != settled(choice, None) or not self._codes(choice):
            return False
        return isinstance(self.room(choice), Room) and choice == self.plainest(choice)

    def room(self, choice: Choice) -> Room | str:
        """The slots beside a choice's draft and buffers, or why there are none."""
        footing = (choice.coding, choice.draft_bits, choice.drafts, choice.demand)
        if footing not in self._rooms:
            self._rooms[footing] = self._measured_room(choice)
        return self._rooms[footing]

    def config(self, choice: Choice, system: RunConfig | None = None) -> RunConfig:
        """The configuration of a choice, on all sequences; over a system's other settings if given.

        Raises UsageError when that system cannot make the choice.
        """
        table = self._table if system is None else without_choices(system)
        memory: Table = {"budget": self.budget_bytes}
        if choice.slots == MARGINAL:
            slots = self._slots_of(choice, table)
            memory = {"slots_per_layer": list(slots)}
        return configured(table, choice, memory, self.shape.top_k)

    def system(self, preset: str) -> RunConfig:
        """A preset within the budget. Raises UsageError when it cannot run here."""
        memory = {"budget": self.budget_bytes, "allow_rounds": True}
        table = {key: value for key, value in self._table.items() if key != "preset"}
        return build(table, {"preset": preset}, {"memory": memory})

    def neighbours(self, choice: Choice, dimension: str) -> list[Choice]:
        """The possible choices that differ in one dimension, and in what hangs on it."""
        found = []
        for value in self.values[dimension]:
            other = replace(choice, **{dimension: value})
            if dimension == "depth" and value == NEVER and choice.coding == "coded-base":
                other = replace(other, coding="coded")  # without a draft a base is mostly ballast
            other = settled(other, max(self.bits, default=None))
            if other != choice and self.has(other):
                found.append(other)
        return found

    def with_bits(self, bits: int | None) -> RunConfig:
        """The base with a draft of that many bits, or with the one it has."""
        if bits is None:
            return self.base
        experts = self.base.experts.model_copy(update={"draft_bits": bits})
        return self.base.model_copy(update={"experts": experts})

    def plainest(self, choice: Choice) -> Choice:
        """The simplest choice that makes the same schedule, as far as memory tells.

        Where all experts fit, nothing is ever evicted; where every layer would get the same number
        of slots, there is nothing to distribute.
        """
        room = self.room(choice)
        if isinstance(room, str):
            return choice
        if room.each >= self.shape.num_experts:
            return replace(choice, eviction="lru", slots=UNIFORM, demand="resident")
        uneven = choice.slots != MARGINAL or self._marginal(room) is not None
        return choice if uneven else replace(choice, slots=UNIFORM)

    def codings(self, drafts: bool) -> dict[str, tuple[str, int | None]]:
        """The codings with their bits, by name, with or without a draft."""
        depth = "1" if drafts else NEVER
        pairs = itertools.product(self.values["coding"], self.values["draft_bits"])
        choices = [Choice(depth, coding=coding, draft_bits=bits) for coding, bits in pairs]
        possible = [c for c in choices if c == settled(c, None) and self._codes(c)]
        return {f"{c.coding} {c.draft_bits}": (c.coding, c.draft_bits) for c in possible}

    def rules(self, name: str, drafts: bool) -> tuple[str, ...]:
        """The eviction or prefetch rules that are offered, with or without a draft."""
        undrafted = {rule: settled(Choice(**{name: rule}), None) for rule in self.values[name]}
        kept = [rule for rule in undrafted if drafts or getattr(undrafted[rule], name) == rule]
        return tuple(kept)

    def _values(self) -> dict[str, tuple[Any, ...]]:
        drafts = bool(self.bits)
        gate = self.trace.gate_ids is not None
        fixed = tuple(str(depth) for depth in range(1, DEEPEST + 1))
        return {
            "depth": (NEVER, *fixed, "governor") if drafts else (NEVER,),
            "draft_bits": (None, *self.bits, *self._base_bits),
            "coding": _CODINGS,
            "eviction": tuple(
                name for name, rule in EVICTION.items() if _offered(name, rule.needs, drafts, gate)
            ),
            "prefetch": tuple(
                name for name, rule in PREFETCH.items() if _offered(name, rule.needs, drafts, gate)
            ),
            "slots": (UNIFORM, MARGINAL, SHARED),
            "demand": ("resident", "staging"),
        }

    @property
    def _base_bits(self) -> tuple[int, ...]:
        """Bits of a base that nothing is drafted with: any, where the draft is not the trace's."""
        return tuple(bits for bits in sorted(REFINEMENT_SHARE) if bits not in self.bits)

    def _codes(self, choice: Choice) -> bool:
        if not choice.drafts:
            return choice.coding != "coded-base" or choice.draft_bits in REFINEMENT_SHARE
        if choice.draft_bits not in self.bits:
            return False
        # A second copy beside coded experts: a base of the same bits draws the same draft, and
        # loads and keeps less.
        possible = choice.coding == "plain" or choice.draft_bits in REFINEMENT_SHARE
        return choice.coding != "coded" and possible

    def _measured_room(self, choice: Choice) -> Room | str:
        plain = replace(choice, slots=UNIFORM, eviction="lru", prefetch="none")
        try:
            each = resolve(self.config(plain)).plan
            pooled = resolve(self.config(replace(plain, slots=SHARED))).plan
        except UsageError as error:
            return str(error)
        return Room(each.slots // self.shape.moe_layers, pooled.slots)

    def _slots_of(self, choice: Choice, table: Table) -> tuple[int, ...]:
        shared = configured(
            table,
            replace(choice, slots=SHARED),
            {"budget": self.budget_bytes},
            self.shape.top_k,
        )
        total = resolve(shared).plan.slots
        slots = self._allocated(total)
        if slots is None:
            raise UsageError(f"{total} slots are too few to give some layers more than others")
        return slots

    def _marginal(self, room: Room) -> tuple[int, ...] | None:
        """Slots by marginal benefit; None where that is what every layer has anyway."""
        slots = self._allocated(room.total)
        return None if slots is None or set(slots) == {room.each} else slots

    def _allocated(self, total: int) -> tuple[int, ...] | None:
        if total not in self._slots:
            self._slots[total] = allocate(self._saved, total, self.shape.top_k)
        return self._slots[total]

    @cached_property
    def _saved(self) -> Any:
        every = self.base.trace.model_copy(update={"part": TUNING, "tokens": 10**9})
        half = self.trace.select(served_sequences(every, self.trace))
        return saved_loads(half, warm=self.base.trace.between == "warm")

    def _recorded_bits(self) -> tuple[int, ...]:
        """Bits of the drafts whose routes and acceptance are known, ascending."""
        trace = self.base.trace
        assumed = trace.assumed_acceptance is not None or trace.assumed_recall is not None
        configured_bits = self.base.experts.draft_bits
        if not self.trace.is_paired and not assumed:
            return ()
        if not self.trace.is_paired or self.trace.header.draft is None:
            return (configured_bits or 4,)
        return tuple(bits for bits in DRAFT_BITS if self._records(bits))

    def _records(self, bits: int) -> bool:
        draft = whole_trace(self.with_bits(bits), self.shape).header.draft
        return draft is not None and draft.bits == bits

    def _check_halves(self) -> None:
        part = self.base.trace.part
        if part != ALL:
            raise UsageError(
                f'trace.part is "{part}", and tuning divides the sequences itself: leave it out'
            )
        limit = self.base.trace.sequences
        count = min(self.trace.num_sequences, limit or self.trace.num_sequences)
        if count < 2:
            raise UsageError(
                f"tuning needs at least 2 sequences, one to tune on and one to check on, and "
                f"trace {self.base.trace.path!r} serves {count}: give a trace or trace.sequences "
                "with more"
            )

    def _check_room(self) -> None:
        """Find out what fits; when nothing does, say how much would."""
        tried = [
            Choice(NEVER, coding=coding, draft_bits=bits) for coding, bits in self._undrafted()
        ]
        tried += [
            Choice("1", coding=coding, draft_bits=bits)
            for coding, bits in itertools.product(_CODINGS, self.bits)
            if self._codes(Choice("1", coding=coding, draft_bits=bits))
        ]
        tried += [replace(choice, demand="staging") for choice in tried]
        if any(isinstance(self.room(choice), Room) for choice in tried):
            return
        first = self.room(tried[0])
        least = [size for choice in tried if (size := self._least_bytes(choice)) is not None]
        if not least:
            raise UsageError(str(first))
        raise UsageError(
            f"{self.shape.name} does not fit in {format_bytes(self.budget_bytes)} in any form: the "
            f"smallest budget that works is {min(least)} B ({format_bytes(min(least))}), with one "
            "slot a layer"
        )

    def _undrafted(self) -> list[tuple[str, int | None]]:
        return [("plain", None), ("coded", None), *(("coded-base", b) for b in REFINEMENT_SHARE)]

    def _least_bytes(self, choice: Choice) -> int | None:
        try:
            config = configured(self._table, choice, {"slots": 1}, self.shape.top_k)
            return resolve(config).plan.total_bytes
        except UsageError:
            return None


def halves_of(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """The configuration on the tuning half and on the held-out half."""
    return with_part(config, TUNING), with_part(config, HELD_OUT)


def _offered(name: str, needs: frozenset[str], drafts: bool, gate: bool) -> bool:
    """Whether a rule is a choice: no bound, and everything that it needs is there."""
    if "future" in needs or name in _LEFT_OUT:
        return False
    drafted = "paired" in needs or name == "predicted"
    return (drafts or not drafted) and (gate or "gate" not in needs)


def _draft_note(base: RunConfig, trace: Trace, bits: tuple[int, ...]) -> str | None:
    if not bits:
        return (
            f"trace {base.trace.path!r} has no draft: only choices without one were searched "
            "(assume one with trace.assumed_acceptance)"
        )
    if not trace.is_paired:
        return f"the draft is assumed: its bits stay {bits[0]}, what it would lose is not known"
    missing = [str(b) for b in DRAFT_BITS if b not in bits]
    if trace.header.draft is None or not missing:
        return None
    return f"no draft of {' or '.join(missing)} bits was recorded: not searched"


def _told(footing: Footing) -> str:
    coding, bits, drafts, demand = footing
    draft = f", {bits} bits" if bits else ""
    return f"{coding}{draft}, {'draft' if drafts else 'no draft'}, {demand}"
