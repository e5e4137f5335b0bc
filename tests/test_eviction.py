"""Every eviction rule does what its name says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from routes import EVICTIONS, make_resident, offloader_of, random_trace, run_of, serve, setup_of

from specter_sim.offload.residency import access
from specter_sim.policies import EVICTION
from specter_sim.policies.eviction import find_slot
from specter_sim.policies.state import (
    DEMAND,
    LAYER,
    PREFETCH,
    SEED,
    TICK,
    WINDOW,
    State,
    new_state,
    power,
    scramble,
    seek_future,
)
from specter_sim.replay import replay_sequential

E = 6


def filled(residents: list[int], layers: int = 2, **given: Any) -> State:
    """A state with all slots of layer 0 and layer 1 taken by these flat indices, used in order."""
    counts = [sum(1 for i in residents if i // E == layer) for layer in range(layers)]
    state = new_state(layers, E, 2, [max(1, count) for count in counts], **given)
    make_resident(offloader_of(state), residents)
    return state


def victim(s: State, rule: str, kind: int = DEMAND, wanted: int = 5) -> int:
    slot = find_slot(s, wanted, kind, EVICTION[rule].rule)
    return -1 if slot < 0 else s.occupant[slot]


def use(s: State, index: int, times: int = 1, window: int | None = None) -> None:
    if window is not None:
        s.counters[WINDOW] = window
    for _ in range(times):
        access(s, index)


def test_lru() -> None:
    s = filled([0, 1, 2])
    use(s, 0)
    assert victim(s, "lru") == 1


def test_fifo() -> None:
    s = filled([0, 1, 2])
    use(s, 0)
    assert victim(s, "fifo") == 0


def test_lfu_counts_and_breaks_ties_by_age() -> None:
    s = filled([0, 1, 2])
    use(s, 0)
    use(s, 1)
    assert victim(s, "lfu") == 2
    use(s, 2)
    assert victim(s, "lfu") == 0


def test_lfu_fades() -> None:
    s = filled([0, 1], decay=0.5)
    use(s, 0, times=3, window=1)
    assert victim(s, "lfu") == 1
    use(s, 1, times=1, window=5)
    assert victim(s, "lfu") == 0


def test_lfu_forgets_the_evicted_only_when_asked() -> None:
    for forget, uses in ((True, 0.0), (False, 4.0)):
        s = filled([0], layers=1, forget=forget)
        use(s, 0, times=3)
        replay_sequential(s, EVICTION["lru"].rule, [3])
        assert s.uses[0] == uses


def test_random_is_seeded_and_moves_with_time() -> None:
    def victims(seed: int) -> list[int]:
        s = filled([0, 1, 2, 3], layers=1)
        s.knobs[SEED] = seed
        found = []
        for tick in range(60):
            s.counters[TICK] = tick
            found.append(victim(s, "random"))
        return found

    assert victims(1) == victims(1)
    assert victims(1) != victims(2)
    shares = np.bincount(victims(3), minlength=4)
    assert shares.min() >= 5


def test_least_stale_blames_passes_not_layers_to_come() -> None:
    residents = [0, 1, E + 0, E + 1]
    s = new_state(2, E, 2, [4])
    make_resident(offloader_of(s), residents)
    for index in residents:
        s.last_window[index] = 4
    s.last_window[1] = 3
    s.counters[WINDOW], s.counters[LAYER] = 5, 0
    assert victim(s, "least-stale", wanted=E + 5) == 1
    # Used last pass, and layer 1 is still to come in this one: not stale at all.
    s.last_window[1] = 5
    assert victim(s, "least-stale", wanted=E + 5) == 0
    s.last_window[0] = 5
    assert victim(s, "least-stale", wanted=E + 5) == 0  # all are fresh: first come, first gone


def test_hot_set_goes_last_and_never_for_a_prefetch() -> None:
    hot = [0] * (2 * E)
    hot[0] = hot[1] = 1
    s = filled([0, 1, 2], hot=hot)
    assert victim(s, "hot-lru") == 2
    s.holds[2] = 1
    assert victim(s, "hot-lru") == 0
    assert victim(s, "hot-lru", PREFETCH) == -1


def test_predicted_experts_of_layers_to_come_stay() -> None:
    s = new_state(2, E, 2, [3])
    make_resident(offloader_of(s), [0, E + 0, E + 1])
    use(s, 0, times=5)
    s.predicted[E + 0] = 1
    assert victim(s, "predicted", wanted=5) == E + 1
    s.predicted[E + 1] = 2
    assert victim(s, "predicted", wanted=5) == 0
    s.counters[LAYER] = 1  # predictions of a layer already reached count no more
    assert victim(s, "predicted", wanted=5) == E + 0


def test_belady_evicts_the_farthest_next_use() -> None:
    begin = [0, 1, 2, 3] + [3] * (2 * E - 3)
    s = new_state(2, E, 2, [3, 1], future=(begin, [5, 9, 7]))
    make_resident(offloader_of(s), [0, 1, 2])
    for index in range(3):
        seek_future(s, index, 0)
    assert victim(s, "belady") == 1
    seek_future(s, 2, 8)  # its only use has passed
    assert victim(s, "belady") == 2


def test_free_slots_come_first_and_held_or_loading_never_go() -> None:
    for rule in EVICTIONS:
        s = filled([0, 1, 2])
        s.holds[0] = s.holds[1] = 1
        assert victim(s, rule) == 2
        s.residency[2] = 1
        assert victim(s, rule) == -1
        roomy = new_state(1, E, 2, [4])
        make_resident(offloader_of(roomy), [0, 1, 2])
        assert victim(roomy, rule) == -1
        assert find_slot(roomy, 5, DEMAND, EVICTION[rule].rule) == 3


@pytest.mark.parametrize("rule", EVICTIONS)
def test_a_rule_never_changes_the_state(rule: str) -> None:
    s = filled([0, 1, 2, E, E + 1], decay=0.9)
    before = repr(s)
    victim(s, rule)
    victim(s, rule, PREFETCH)
    assert repr(s) == before


def test_power_by_squaring() -> None:
    for exponent in range(40):
        assert power(0.9, exponent) == pytest.approx(0.9**exponent, rel=1e-12)
    assert power(0.5, -3) == 1.0


def test_scramble_is_even_and_depends_on_everything() -> None:
    draws = np.array([scramble(s, a, b) for s in range(8) for a in range(40) for b in range(40)])
    assert draws.min() >= 0 and draws.max() < 2**31
    shares = np.histogram(draws, bins=16, range=(0, 2**31))[0] / len(draws)
    assert np.abs(shares * 16 - 1).max() < 0.1
    assert len(np.unique(draws)) > 0.99 * len(draws)


# --- in the world


@pytest.mark.parametrize("layout", ["per-layer", "global"])
@pytest.mark.parametrize("depth", [0, 3])
def test_belady_loads_the_least(layout: str, depth: int) -> None:
    for seed in range(3):
        trace = random_trace(48, experts=10, seed=seed)
        loads = {
            rule: run_of(
                trace,
                memory__slots=4,
                memory__layout=layout,
                policy__eviction=rule,
                policy__depth=depth,
            ).result.loads
            for rule in EVICTIONS
        }
        assert loads["belady"] == min(loads.values()), loads


def clairvoyant_loads(
    unions: list[list[int]], slots: int, initial: frozenset[int] = frozenset()
) -> int:
    """Loads of one layer's cache that sees the future and evicts only what is not in use."""
    cached = set(initial)
    loads = 0
    for place, union in enumerate(unions):
        for expert in [e for e in union if e not in cached]:
            if len(cached) == slots:
                idle = sorted(cached - set(union))
                cached.remove(max(idle, key=lambda e: next_place(unions, place, e)))
            cached.add(expert)
            loads += 1
    return loads


def next_place(unions: list[list[int]], place: int, expert: int) -> int:
    later = (at for at in range(place + 1, len(unions)) if expert in unions[at])
    return next(later, len(unions))


def test_belady_expects_only_what_is_served() -> None:
    """What was recorded but is not decoded must not look like a near use."""
    trace = random_trace(400, layers=2, experts=12, sequences=2, seed=5)
    setup = setup_of(trace, trace__tokens=128, memory__slots=4, policy__eviction="belady")
    assert [(r.start, r.last) for r in setup.requests] == [(0, 64), (400, 464)]
    run = serve(setup)
    served = [union for request in run.served for union in request.unions]
    assert run.result.loads == sum(clairvoyant_loads(served[layer::2], 4) for layer in range(2))


def test_belady_sees_from_where_a_cold_request_starts() -> None:
    """Initial residents of a later request have their next use ahead, not in the past."""
    trace = random_trace(64, layers=2, experts=12, sequences=3, locality=0.9, seed=6)
    setup = setup_of(
        trace,
        trace__tokens=192,
        trace__between="cold",
        memory__slots=4,
        memory__initial="highest",
        policy__eviction="belady",
    )
    run = serve(setup)
    least = [
        sum(
            clairvoyant_loads(request.unions[layer::2], 4, frozenset({8, 9, 10, 11}))
            for layer in range(2)
        )
        for request in run.served
    ]
    assert [request.counts["demand_loads"] for request in run.served] == least


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_belady_is_optimal_over_windows_that_are_partly_taken_back(acceptance: float) -> None:
    """A rejected position is demanded again: its experts' next use is the next window."""
    for seed in range(4):
        trace = random_trace(60, layers=2, experts=14, acceptance=acceptance, seed=seed)
        run = run_of(trace, memory__slots=8, policy__eviction="belady", policy__depth=3)
        served = run.served[0].unions
        least = sum(clairvoyant_loads(served[layer::2], 8) for layer in range(2))
        assert run.result.loads == least
