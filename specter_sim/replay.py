"""Replay routes through a cache without a clock: hits and misses only.

The same residency and eviction code as every other run, with loads that arrive at once.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

from specter_sim.offload import schedule
from specter_sim.offload.residency import access, arrived, reserve
from specter_sim.policies.eviction import find_slot
from specter_sim.policies.state import (
    DEMAND,
    HITS,
    MISSES,
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
    hits, misses = s.counters[HITS], s.counters[MISSES]
    for position, row in enumerate(rows):
        schedule.begin_window(s, position, 0, position + 1)
        for layer, experts in enumerate(row):
            demand_and_run(s, key, layer, experts, len(experts))
        schedule.end_window(s)
    return Counts(s.counters[HITS] - hits, s.counters[MISSES] - misses)


def replay_rows(
    s: State,
    key: VictimKey,
    ids: Sequence[int],
    first: int,
    last: int,
    row: MutableSequence[int],
    hits: MutableSequence[int],
) -> None:
    """``replay_batched`` over flat memory, for positions ``first`` .. ``last``.

    Args:
        ids: [T*L*K] ids in the layer.
        row: [K] working memory.
        hits: [L] hits of each layer are added here.
    """
    for position in range(first, last):
        schedule.begin_window(s, position, 0, position + 1)
        for layer in range(s.layers):
            begin, before = (position * s.layers + layer) * s.top_k, s.counters[HITS]
            for rank in range(s.top_k):
                row[rank] = ids[begin + rank]
            demand_and_run(s, key, layer, row, s.top_k)
            hits[layer] += s.counters[HITS] - before
        schedule.end_window(s)


def demand_and_run(
    s: State, key: VictimKey, layer: int, experts: Sequence[int], count: int
) -> None:
    """One layer with loads that arrive at once; its ``count`` experts release as they run."""
    schedule.demand(s, layer, experts, count, s.hints, 0)
    waiting, base = count, layer * s.experts
    while waiting > 0:
        load_all(s, key)
        for place in range(count):
            index = base + experts[place]
            if s.holds[index] > 0 and s.residency[index] == RESIDENT:
                schedule.release(s, index)
                waiting -= 1


def load_all(s: State, key: VictimKey) -> None:
    """Every load that may start arrives."""
    load = schedule.next_load(s, key)
    while load[0] >= 0:
        schedule.copied(s, load[0], load[2])
        load = schedule.next_load(s, key)


def replay_sequential(s: State, key: VictimKey, indices: Sequence[int]) -> Counts:
    """Look experts up one after another, as a plain cache is tested: nothing is held.

    Args:
        indices: flat indices in lookup order; the place of a lookup is its position in time.
    """
    hits = 0
    for place, index in enumerate(indices):
        hits += look_up(s, key, place, index)
    return Counts(hits, len(indices) - hits)


def look_up(s: State, key: VictimKey, place: int, index: int) -> int:
    """One lookup that holds nothing: 1 for a hit, 0 for a miss, which loads at once."""
    s.counters[WINDOW] = place
    s.counters[NEXT_START] = place + 1
    hit = 1 if s.residency[index] == RESIDENT else 0
    if hit == 0:
        slot = find_slot(s, index, DEMAND, key)
        reserve(s, group_of(s, index), slot, index)
        arrived(s, index)
    access(s, index)
    return hit
