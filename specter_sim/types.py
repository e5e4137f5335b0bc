"""The records and enums every part of Specter speaks in.

An *index* is the flat number ``layer * num_experts + expert`` of one expert of one MoE layer.
Records hold seconds and bytes; ids are plain ints so that they survive a journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class LoadKind(IntEnum):
    """Why a load crosses the link: needed now, or expected to be."""

    DEMAND = 0
    PREFETCH = 1


class Load(NamedTuple):
    """One expert to copy, by its flat index: the slot it takes, why, and whom it evicts.

    ``victim`` is the flat index of the evicted expert, -1 when the slot was free.
    """

    expert: int
    slot: int
    kind: LoadKind
    victim: int


class Copied(NamedTuple):
    """A finished load and the seconds from its turn on the link to its end.

    They cover its data, what is left of its latency, and a bounce copy not yet done.
    """

    load: Load
    seconds: float


class DraftStep(NamedTuple):
    """One draft forward: its 1-based number, the experts it routed to, its seconds.

    ``routes`` are flat indices over all layers.
    """

    step: int
    routes: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class WindowOutcome:
    """What became of one draft window.

    Attributes:
        depth: tokens drafted.
        accepted: draft tokens kept; the window commits ``accepted + 1`` tokens.
        draft_s: seconds spent drafting.
        verify_s: seconds from the end of the draft to the commit, stalls included.
        demands: experts demanded, summed over layers.
        loads: loads started during the window, prefetches included.
    """

    depth: int
    accepted: int
    draft_s: float
    verify_s: float
    demands: int
    loads: int
