"""Replay routes through a cache without a clock: hits and misses only.

The same residency and eviction code as every other run, with loads that arrive at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specter_sim.offload import schedule
from specter_sim.offload.residency import access, arrived, reserve
from specter_sim.policies.eviction import find_slot
from specter_sim.policies.state import (
    DEMAND,
    NEXT_START,
    RESIDENT,
    WINDOW,
    State,
    VictimKey,
    group_of,
)


class Counts(NamedTuple):
    """Lookups that found their expert resident, and those that did not."""

    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        """Hits per lookup."""
        return self.hits / max(1, self.hits + self.misses)


def replay_batched(s: State, key: VictimKey, rows: Sequence[Sequence[Sequence[int]]]) -> Counts:
    """Demand each layer's top-k at once, as decoding does: the current set is never evicted.

    Args:
        rows: [token][layer] distinct ids in the layer.
    """
    hits = misses = 0
    for position, row in enumerate(rows):
        schedule.begin_window(s, position, 0, position + 1)
        for layer, experts in enumerate(row):
            base = layer * s.experts
            for expert in experts:
                resident = s.residency[base + expert] == RESIDENT
                hits, misses = hits + resident, misses + (not resident)
            demand_and_run(s, key, layer, experts)
        schedule.end_window(s)
    return Counts(hits, misses)


def demand_and_run(s: State, key: VictimKey, layer: int, experts: Sequence[int]) -> None:
    """One layer with loads that arrive at once; experts release their slots as they run."""
    schedule.demand(s, layer, experts, len(experts), (), 0)
    waiting = [layer * s.experts + expert for expert in experts]
    while waiting:
        load = schedule.next_load(s, key)
        while load[0] >= 0:
            schedule.copied(s, load[0], load[2])
            load = schedule.next_load(s, key)
        ready = [index for index in waiting if s.residency[index] == RESIDENT]
        for index in ready:
            schedule.release(s, index)
        waiting = [index for index in waiting if index not in ready]


def replay_sequential(s: State, key: VictimKey, indices: Sequence[int]) -> Counts:
    """Look experts up one after another, as a plain cache is tested: nothing is held.

    Args:
        indices: flat indices in lookup order; the place of a lookup is its position in time.
    """
    hits = misses = 0
    for place, index in enumerate(indices):
        s.counters[WINDOW] = place
        s.counters[NEXT_START] = place + 1
        if s.residency[index] == RESIDENT:
            hits += 1
        else:
            misses += 1
            slot = find_slot(s, index, DEMAND, key)
            reserve(s, group_of(s, index), slot, index)
            arrived(s, index)
        access(s, index)
    return Counts(hits, misses)
