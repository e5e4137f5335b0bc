"""The clairvoyant bound equals what trying everything finds, and no run beats it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import random_trace, run_of

from specter_sim.bound import least_loads

IDS = st.integers(0, 4)


def by_trying_everything(
    unions: Sequence[frozenset[int]], slots: int, start: frozenset[int]
) -> int:
    """The least loads over every choice of what to keep after every demand."""

    @cache
    def least(place: int, kept: frozenset[int]) -> int:
        if place == len(unions):
            return 0
        held = kept | unions[place]
        loads = len(unions[place] - kept)
        keep = min(slots, len(held))
        choices = (frozenset(chosen) for chosen in combinations(sorted(held), keep))
        return loads + min(least(place + 1, chosen) for chosen in choices)

    return least(0, start)


@settings(max_examples=300, deadline=None)
@given(
    unions=st.lists(st.frozensets(IDS, min_size=1, max_size=3), min_size=1, max_size=7),
    slots=st.integers(1, 4),
    start=st.frozensets(IDS, max_size=4),
)
def test_equals_the_exhaustive_optimum(
    unions: list[frozenset[int]], slots: int, start: frozenset[int]
) -> None:
    start = frozenset(sorted(start)[:slots])
    given_unions = [sorted(union) for union in unions]
    assert least_loads(given_unions, slots, start) == by_trying_everything(unions, slots, start)


def test_known_cases() -> None:
    assert least_loads([[0, 1], [0, 1], [0, 1]], slots=2) == 2
    assert least_loads([[0, 1], [0, 1]], slots=2, resident=[0, 1]) == 0
    assert least_loads([[0], [1], [2]] * 3, slots=3) == 3
    assert least_loads([[0, 1, 2]] * 3, slots=1) == 3 + 2 + 2
    assert least_loads([], slots=1) == 0


@pytest.mark.parametrize("layout", ["per-layer", "global"])
@pytest.mark.parametrize("depth", ["never", "4"])
@pytest.mark.parametrize("eviction", ["lru", "belady"])
def test_no_run_beats_it(layout: str, depth: str, eviction: str) -> None:
    for seed in range(4):
        r = run_of(
            random_trace(40, experts=10, seed=seed),
            memory__layout=layout,
            memory__slots=4,
            policy__eviction=eviction,
            policy__depth=depth,
            machine__link_bandwidth="2 MB/s",
        ).result
        assert r.bound_resource == "link"
        assert r.distance_to_bound == pytest.approx(r.decode_s / r.bound_s)
        assert r.distance_to_bound >= 1


def test_it_is_the_gpu_when_the_link_is_fast() -> None:
    trace = random_trace(20)
    r = run_of(trace, machine__link_bandwidth="10 GB/s").result
    assert r.bound_resource == "gpu"
    # As loads arrive, a layer's experts run in more launches than they need.
    assert 0.8 * (r.compute_s + r.draft_s) < r.bound_s < r.compute_s + r.draft_s
    resident = run_of(trace, memory__slots=8, memory__initial="popular").result
    assert resident.bound_s == pytest.approx(resident.compute_s + resident.draft_s)


@pytest.mark.parametrize("depth", ["never", "3"])
@pytest.mark.parametrize("bandwidth", ["2 MB/s", "200 MB/s"])
def test_one_runs_bound_holds_for_every_other_policy(depth: str, bandwidth: str) -> None:
    common = {"policy__depth": depth, "machine__link_bandwidth": bandwidth, "memory__slots": 4}
    trace = random_trace(60, experts=10, seed=3)
    prefetches = ("none", "oracle") if depth == "never" else ("none", "continuous", "oracle")
    results = [
        run_of(trace, policy__eviction=eviction, policy__prefetch=prefetch, **common).result
        for eviction in ("lru", "fifo", "belady")
        for prefetch in prefetches
    ]
    assert max(r.bound_s for r in results) <= min(r.decode_s for r in results)
