"""One choice among the systems that a budget allows, and the configuration it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from specter_sim.config import RunConfig, Table, build, resolved
from specter_sim.policies import PREFETCH

NEVER = "never"
UNIFORM, MARGINAL, SHARED = "uniform", "marginal", "shared"


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen jointly; a field is one dimension.

    Attributes:
        depth: "never", "governor", or a fixed depth as a number's text.
        slots: "uniform", "marginal" (more for layers where one more saves most loads), or
            "shared" (one pool for all layers).
        coding: the form of the experts.
        draft_bits: bits of the draft or base; None when neither is on the device.
    """

    depth: str = NEVER
    eviction: str = "lru"
    prefetch: str = "none"
    slots: str = UNIFORM
    coding: str = "plain"
    draft_bits: int | None = None
    demand: str = "resident"

    @property
    def drafts(self) -> bool:
        """Whether anything is drafted."""
        return self.depth != NEVER

    @property
    def key(self) -> str:
        """A text that no other choice has."""
        return "|".join(str(getattr(self, name)) for name in DIMENSIONS)

    @property
    def label(self) -> str:
        """The choice in words; what is as in the baseline is left out."""
        depth = "no draft" if not self.drafts else f"depth {self.depth}"
        bits = "" if self.draft_bits is None else f", {self.draft_bits} bits"
        others = [
            value
            for value, usual in (
                (f"{self.slots} slots", "uniform slots"),
                (self.demand, "resident"),
            )
            if value != usual
        ]
        told = [depth, self.eviction, f"prefetch {self.prefetch}", f"{self.coding}{bits}", *others]
        return " + ".join(told)


DIMENSIONS = tuple(field.name for field in fields(Choice))
BASELINE = Choice()  # plain LRU on demand, the same slots everywhere, no draft


def settled(choice: Choice, bits: int | None) -> Choice:
    """The choice with what cannot go together repaired; ``bits`` where a draft has none yet.

    Without a draft there is nothing to follow or to announce; a draft needs its bits.
    """
    if not choice.drafts:
        follows = "paired" in PREFETCH[choice.prefetch].needs
        choice = replace(
            choice,
            prefetch="none" if follows else choice.prefetch,
            eviction="lru" if choice.eviction == "predicted" else choice.eviction,
        )
    if not choice.drafts and choice.coding != "coded-base":
        return replace(choice, draft_bits=None)
    return replace(choice, draft_bits=choice.draft_bits or bits)


def choice_of(config: RunConfig) -> Choice:
    """What a configuration chooses; its parameters beyond that are not told."""
    policy, experts = config.policy, config.experts
    depth = policy.depth
    if depth == "fixed":
        depth = str(policy.depth_params.get("depth", 4))
    slots = SHARED if config.memory.layout == "global" else UNIFORM
    return settled(
        Choice(
            depth,
            policy.eviction,
            policy.prefetch,
            slots if config.memory.slots_per_layer is None else MARGINAL,
            experts.form,
            experts.draft_bits,
            policy.demand,
        ),
        experts.draft_bits,
    )


def table_of(choice: Choice, memory: Mapping[str, object], staging_slots: int) -> Table:
    """The layer of a configuration that makes a choice; ``memory`` holds its limit."""
    bits = {} if choice.draft_bits is None else {"draft_bits": choice.draft_bits}
    staged = staging_slots if choice.demand == "staging" else 0
    layout = "global" if choice.slots == SHARED else "per-layer"
    return {
        "experts": {"form": choice.coding, **bits},
        "memory": {"layout": layout, "staging_slots": staged, "allow_rounds": True, **memory},
        "policy": {
            "eviction": choice.eviction,
            "prefetch": choice.prefetch,
            "depth": choice.depth,
            "demand": choice.demand,
        },
    }


def without_choices(config: RunConfig) -> Table:
    """A configuration as a layer to lay choices over: its memory's limit and layout are left out.

    Parameters that it gives to a rule stay with that rule.
    """
    table = resolved(config)
    table["preset"] = None
    table["memory"] = {"initial": config.memory.initial}
    return table


def with_part(config: RunConfig, part: str) -> RunConfig:
    """The same configuration on a part of the sequences: "all", "even" or "odd"."""
    trace = config.trace.model_copy(update={"part": part})
    return config.model_copy(update={"trace": trace})


def configured(base: Table, choice: Choice, memory: Table, staging_slots: int) -> RunConfig:
    """The configuration of a choice over a base. Raises UsageError when it makes no sense."""
    return build(base, table_of(choice, memory, staging_slots))
