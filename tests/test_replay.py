"""Cache replays without a clock: batched lookups hold the current set, sequential ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import random_trace, run_of

from specter_sim.policies import EVICTION
from specter_sim.policies.state import RESIDENT, State, new_state
from specter_sim.replay import Counts, demand_and_run, replay_batched, replay_sequential

Rows = list[list[list[int]]]


def rows_of(tokens: int, layers: int, experts: int, top_k: int, seed: int) -> Rows:
    trace = random_trace(tokens, layers, experts, top_k, seed=seed)
    rows: Rows = np.sort(trace.target_ids, axis=2).tolist()
    return rows


def state(layers: int, experts: int, slots: int) -> State:
    return new_state(layers, experts, 2, [slots] * layers)


def test_the_current_set_is_never_evicted() -> None:
    """Sequential lookups lose an expert of the set to a later one of it; batched ones do not."""
    rows = [[[0, 1]], [[2, 3]], [[0, 1]], [[1, 2]]]
    s = state(1, 4, 2)
    for row in rows:
        demand_and_run(s, EVICTION["lru"].rule, 0, row[0], len(row[0]))
        assert all(s.residency[expert] == RESIDENT for expert in row[0])


def test_hits_are_counted_before_anything_is_evicted() -> None:
    """1 is resident when {0, 1} is looked up, although loading 0 alone would have evicted it."""
    rows: Rows = [[[1, 2]], [[0, 1]]]
    batched = replay_batched(state(1, 3, 2), EVICTION["lru"].rule, rows)
    assert batched == Counts(hits=1, misses=3)
    flat = [1, 2, 0, 1]
    sequential = replay_sequential(state(1, 3, 2), EVICTION["lru"].rule, flat)
    assert sequential == Counts(hits=0, misses=4)


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu"])
def test_batched_equals_sequential_when_slots_are_ample(eviction: str) -> None:
    rows = rows_of(60, 2, 8, 2, seed=1)
    flat = [layer * 8 + e for row in rows for layer, ids in enumerate(row) for e in ids]
    rule = EVICTION[eviction].rule
    assert replay_batched(state(2, 8, 8), rule, rows) == replay_sequential(
        state(2, 8, 8), rule, flat
    )


def test_counts_equal_an_lru_written_plainly() -> None:
    rows = rows_of(80, 3, 9, 2, seed=2)
    for slots in (2, 3, 5, 8):
        ours = replay_batched(state(3, 9, slots), EVICTION["lru"].rule, rows)
        assert ours == plain_lru(rows, 3, slots)


def plain_lru(rows: Rows, layers: int, slots: int) -> Counts:
    hits = misses = 0
    for layer in range(layers):
        cached: list[int] = []  # oldest first
        for row in rows:
            found = [e for e in row[layer] if e in cached]
            hits, misses = hits + len(found), misses + len(row[layer]) - len(found)
            cached = ([e for e in cached if e not in row[layer]] + row[layer])[-slots:]
    return Counts(hits, misses)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(2, 8),
    eviction=st.sampled_from(["lru", "lfu", "fifo", "least-stale", "predicted"]),
    seed=st.integers(0, 99),
)
def test_the_world_hits_as_the_replay_does(slots: int, eviction: str, seed: int) -> None:
    """At depth 0 and without prefetch, time decides nothing: the clockless replay agrees."""
    trace = random_trace(20, layers=2, experts=8, seed=seed)
    rows: Rows = np.sort(trace.target_ids, axis=2).tolist()
    r = run_of(trace, memory__slots=slots, policy__eviction=eviction).result
    s = new_state(2, 8, 2, [slots, slots], decay=0.9)
    assert replay_batched(s, EVICTION[eviction].rule, rows) == Counts(r.hits, r.misses)


def test_the_replay_ends_with_one_slot() -> None:
    rows = rows_of(30, 2, 6, 3, seed=3)
    counts = replay_batched(state(2, 6, 1), EVICTION["lru"].rule, rows)
    assert counts.hits + counts.misses == 30 * 2 * 3
    assert counts.misses >= 30 * 2 * 2


def test_hit_rate_of_nothing_is_zero() -> None:
    assert Counts(0, 0).hit_rate == 0
    assert Counts(3, 1).hit_rate == 0.75
