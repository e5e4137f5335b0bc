"""Slots: device memory, each slot for one expert at a time.

Only this file knows which bytes a slot has. A slot that a copy may overwrite is nobody's: whoever
computes takes a lease, copies into leased slots are refused, and a generation number, raised with
every new occupant, turns a view that outlived its expert into an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specter_runtime.host_experts import HostExperts
from specter_runtime.weight_table import Source

_ALIGNMENT_BYTES = 64
_POISON = 0xFF
"""Every byte of an evicted slot in debug mode: a NaN in BF16, FP16 and FP32 alike."""


class Transfer(NamedTuple):
    """Bytes to copy for one load: both addresses, and how many."""

    destination: int
    source: int
    size: int


@dataclass(frozen=True)
class Lease:
    """The slots and generations that a computation is reading."""

    slots: tuple[int, ...]
    generations: tuple[int, ...]


class Slots:
    """All slots of a device, and where each expert is. Experts are flat indices, layer * E + id."""

    def __init__(
        self, store: HostExperts, groups: Sequence[int], staging: int = 0, *, poison: bool = False
    ) -> None:
        """`groups`: slots of each layer, or one number for a pool of all; then a staging pool.

        `poison` fills a slot with NaN as its expert leaves.
        """
        self._store, self._poison = store, poison
        self.experts = max(store.experts)
        sizes = slot_bytes(store, groups, staging)
        self.nbytes = sum(sizes)
        self._memory = _aligned(self.nbytes)
        self._begin = [0, *accumulate(sizes)]
        self._size = sizes
        self._occupant = [-1] * len(sizes)
        self._generation = [0] * len(sizes)
        self._leases = [0] * len(sizes)
        self._slot_of = [-1] * (self.experts * store.layers)
        names = [[part.name for part in parts] for parts in store.parts]
        self._views: list[dict[str, list[Tensor | None]]] = [
            {name: [None] * self.experts for name in of_layer} for of_layer in names
        ]

    def sources(self) -> list[dict[str, Source]]:
        """Where each layer's tables find a resident expert's weights."""
        return self._store.sources(self._views)

    def begin_load(self, slot: int, index: int) -> Transfer:
        """Give a slot to a new expert, whose bytes are still to be copied."""
        if self._leases[slot]:
            raise RuntimeError(f"slot {slot} would be overwritten while it is read")
        self._leave(slot)
        self._occupant[slot] = index
        self._generation[slot] += 1
        layer, expert = divmod(index, self.experts)
        run = self._store.run(layer, expert)
        return Transfer(self._memory.data_ptr() + self._begin[slot], run.data_ptr(), run.numel())

    def arrived(self, slot: int, index: int) -> None:
        """The copy into a slot is complete: its expert may be used."""
        if self._occupant[slot] != index:
            raise RuntimeError(f"a copy of expert {index} ended in slot {slot} of another")
        layer, expert = divmod(index, self.experts)
        self._slot_of[index] = slot
        views = self._store.views(layer, expert, self.bytes_of(slot))
        for name, view in views.items():
            self._views[layer][name][expert] = view

    def place(self, slot: int, index: int) -> None:
        """Fill a slot before a run starts, off the link."""
        self.begin_load(slot, index)
        source = self._store.run(*divmod(index, self.experts))
        self.bytes_of(slot)[: source.numel()] = source
        self.arrived(slot, index)

    @contextmanager
    def lease(self, layer: int, experts: Sequence[int]) -> Iterator[Lease]:
        """Read the weights of resident experts inside: their slots are not overwritten meanwhile.

        A RuntimeError afterwards when one was all the same: what was computed is wrong then.
        """
        lease = self._begin_lease(layer, experts)
        try:
            yield lease
        finally:
            for slot in lease.slots:
                self._leases[slot] -= 1
        self.check(lease)

    def check(self, lease: Lease) -> None:
        """A RuntimeError unless every slot still holds what it held as the lease began."""
        for slot, generation in zip(lease.slots, lease.generations, strict=True):
            if self._generation[slot] != generation:
                raise RuntimeError(f"slot {slot} changed its expert while it was read")

    def _begin_lease(self, layer: int, experts: Sequence[int]) -> Lease:
        base = layer * self.experts
        slots = tuple(self._slot_of[base + expert] for expert in experts)
        if -1 in slots:
            missing = experts[slots.index(-1)]
            raise RuntimeError(f"expert {missing} of MoE layer {layer} is used but not resident")
        for slot in slots:
            self._leases[slot] += 1
        return Lease(slots, tuple(self._generation[slot] for slot in slots))

    def bytes_of(self, slot: int) -> Tensor:
        """The memory of a slot, uint8."""
        return self._memory[self._begin[slot] : self._begin[slot] + self._size[slot]]

    def load_bytes(self, index: int) -> int:
        """Bytes that a load of this expert copies."""
        return self._store.run(*divmod(index, self.experts)).numel()

    def matches(self, slot: int, index: int) -> bool:
        """Whether a slot holds the very bytes of the host's copy of the expert."""
        source = self._store.run(*divmod(index, self.experts))
        return torch.equal(self.bytes_of(slot)[: source.numel()], source)

    def _leave(self, slot: int) -> None:
        index = self._occupant[slot]
        if index < 0:
            return
        layer, expert = divmod(index, self.experts)
        if self._slot_of[index] == slot:
            self._slot_of[index] = -1
            for views in self._views[layer].values():
                views[expert] = None
        if self._poison:
            self.bytes_of(slot).fill_(_POISON)


def slot_bytes(store: HostExperts, groups: Sequence[int], staging: int) -> list[int]:
    """Bytes of every slot: those of its layer's experts, or the largest where layers share."""
    largest = max(store.expert_bytes)
    shared = len(groups) == 1 and store.layers > 1
    per_group = [largest] if shared else list(store.expert_bytes)
    each = [size for size, count in zip(per_group, groups, strict=True) for _ in range(count)]
    return each + [largest] * staging


def _aligned(size: int) -> Tensor:
    """Fresh memory whose first byte has a whole cache line's address."""
    memory = torch.zeros(size + _ALIGNMENT_BYTES, dtype=torch.uint8)
    skip = -memory.data_ptr() % _ALIGNMENT_BYTES
    return memory[skip : skip + size]
