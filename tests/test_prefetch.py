"""Every prefetch rule does what its name says, told by hand and in the world."""

from __future__ import annotations

from typing import Any

import pytest
from routes import (
    drain,
    finish,
    fixed_costs,
    loads_of,
    make_resident,
    offloader_of,
    paired_trace,
    random_trace,
    run_of,
    serve,
    setup_of,
    with_link,
)

from specter_sim.offload.offloader import Offloader
from specter_sim.policies.state import new_state
from specter_sim.results import Result
from specter_sim.types import DraftStep, LoadKind

E = 8


def told(
    prefetch: str, memory: tuple[float, ...] | None = None, slots: int = 4, **given: Any
) -> Offloader:
    state = new_state(3, E, 2, [slots] * 3, **given)
    return offloader_of(state, prefetch=prefetch, depth=4, memory=memory)


def prefetched(offloader: Offloader) -> list[int]:
    return [load.expert for load in drain(offloader) if load.kind is LoadKind.PREFETCH]


def draft(offloader: Offloader, *routes: list[int], first: int = 1) -> None:
    for step, experts in enumerate(routes, first):
        offloader.drafted(DraftStep(step, experts, 1e-3))


def test_none_only_demands() -> None:
    offloader = told("none")
    offloader.begin_window(0, 4)
    draft(offloader, [0, 1], [2, 3])
    offloader.demand(0, [0], hints=[1, 2])
    assert prefetched(offloader) == []


def test_popularity_plans_the_next_layers_most_used() -> None:
    offloader = told("popularity", (2.0,))
    s = offloader.state
    s.uses[3], s.uses[5], s.uses[6] = 1.0, 3.0, 2.0
    s.uses[E + 1], s.uses[E + 2], s.uses[E + 7] = 2.0, 2.0, 1.0
    offloader.begin_window(0, 4)
    assert prefetched(offloader) == [5, 6]
    offloader.demand(0, [0])
    assert prefetched(offloader) == [E + 1, E + 2]
    offloader.demand(1, [0])
    assert prefetched(offloader) == []  # nobody ever used layer 2


def test_gate_plans_the_hinted_experts_of_the_next_layer() -> None:
    offloader = told("gate")
    offloader.begin_window(0, 4)
    assert prefetched(offloader) == []
    offloader.demand(0, [0], hints=[2, 6])
    assert prefetched(offloader) == [E + 2, E + 6]
    offloader.demand(1, [2])
    assert prefetched(offloader) == []


@pytest.mark.parametrize(("share", "step"), [(0.2, 1), (0.5, 2), (1.0, 4)])
def test_draft_once_plans_once(share: float, step: int) -> None:
    offloader = told("draft-early", (share,))
    offloader.begin_window(0, 4)
    seen = []
    for number in range(1, 5):
        draft(offloader, [number], first=number)
        if prefetched(offloader):
            seen.append(number)
    assert seen == [step]


def test_draft_once_prefers_what_was_predicted_most() -> None:
    offloader = told("draft-late", (1.0,), slots=2)
    offloader.begin_window(0, 4)
    draft(offloader, [1, 2], [2, 3], [3, 2], [5, 6])
    assert prefetched(offloader) == [2, 3]


def test_draft_first_replans_after_its_first_steps_only() -> None:
    offloader = told("draft-first", (2.0,))
    offloader.begin_window(0, 4)
    news = []
    for number in range(1, 5):
        draft(offloader, [number], first=number)
        news.append(prefetched(offloader))
    assert news == [[1], [2], [], []]


def test_continuous_goes_earliest_deadline_first() -> None:
    offloader = told("continuous")
    offloader.begin_window(0, 4)
    draft(offloader, [2 * E + 1, E + 4, 3, 2])
    assert prefetched(offloader) == [2, 3, E + 4, 2 * E + 1]
    draft(offloader, [2 * E + 2, 5], first=2)
    assert prefetched(offloader) == [5, 2 * E + 2]


def test_continuous_drops_what_has_not_started_when_it_replans() -> None:
    offloader = told("continuous")
    offloader.begin_window(0, 4)
    draft(offloader, [E + 1, 2 * E + 1])
    first = offloader.next_load()
    assert first is not None and first.expert == E + 1
    draft(offloader, [4], first=2)  # an earlier deadline overtakes
    assert prefetched(offloader) == [4, 2 * E + 1]


def test_stream_plans_whole_layers_in_order() -> None:
    offloader = offloader_of(new_state(3, E, 2, [2 * E]), prefetch="stream")
    offloader.begin_window(0, 0)
    assert prefetched(offloader) == list(range(2 * E))


def test_an_oracle_tells_the_truth_layer_by_layer() -> None:
    routes = [[layer * E + (p + r) % E for layer in range(3) for r in (0, 3)] for p in range(12)]
    flat = [index for row in routes for index in row]
    offloader = told("oracle", (1.0, 1.0, 1.0), slots=E, routes_ahead=flat)
    offloader.begin_window(2, 4)
    need = [
        sorted({index for row in routes[2:7] for index in row if index // E == layer})
        for layer in range(3)
    ]
    assert sorted(prefetched(offloader)) == need[0]
    offloader.demand(0, [index % E for index in need[0]])
    assert sorted(prefetched(offloader)) == need[1]
    early = told("oracle", (1.0, 1.0, 0.0), slots=E, routes_ahead=flat)
    early.begin_window(2, 4)
    assert sorted(prefetched(early)) == sorted(need[0] + need[1] + need[2])


@pytest.mark.parametrize(("recall", "precision"), [(1, 1), (0.5, 1), (0.8, 0.5), (0.5, 0.25)])
def test_an_oracles_knobs_mean_what_they_say(recall: float, precision: float) -> None:
    """Over many windows, about ``recall`` is announced and ``precision`` of that is needed."""
    experts, told_right, needed, announced = 128, 0, 0, 0
    rows = [[(position * 37 + rank * 11) % experts for rank in range(6)] for position in range(300)]
    state = new_state(1, experts, 6, [experts], routes_ahead=[i for row in rows for i in row])
    offloader = offloader_of(state, prefetch="oracle", memory=(recall, precision, 0.0))
    for position in range(300):
        offloader.begin_window(position, 0)
        planned = {i for i in range(experts) if state.planned[i]}
        need = set(rows[position])
        told_right += len(planned & need)
        needed += len(need)
        announced += len(planned)
    assert told_right / needed == pytest.approx(recall, abs=0.05)
    assert told_right / announced == pytest.approx(precision, abs=0.05)


# --- in the world


def ample(trace: Any, **given: Any) -> Result:
    setup = setup_of(trace, memory__slots=8, **given)
    costs = fixed_costs(setup, draft_s=1e-3, layer_s=1e-3, load_bytes=1000)
    return serve(with_link(costs, 1e9)).result


@pytest.mark.parametrize("depth", ["never", "4"])
def test_a_perfect_oracle_with_time_and_slots_leaves_no_miss(depth: str) -> None:
    r = ample(
        random_trace(40, layers=4, seed=1),
        policy__prefetch="oracle",
        policy__prefetch_params={"lead": 1},
        policy__depth=depth,
    )
    # Only the very first layer has no layer before it to hide behind when nothing is drafted.
    assert r.misses == 0 if depth == "4" else r.misses + r.pending_hits <= 40 * 2
    assert r.wasted_prefetches == 0


def test_recall_of_a_half_leaves_about_half_the_misses() -> None:
    trace = random_trace(120, layers=4, experts=8, locality=0.0, seed=2)
    settings: dict[str, Any] = {"policy__depth": 1, "memory__slots": 4}
    none = run_of(trace, policy__prefetch="none", **settings).result
    half = run_of(
        trace, policy__prefetch="oracle", policy__prefetch_params={"recall": 0.5}, **settings
    ).result
    share = (half.useful_prefetches + half.late_prefetches) / none.misses
    assert 0.35 < share < 0.65
    assert half.wasted_prefetches < 0.15 * half.prefetch_loads


def test_precision_wastes_loads() -> None:
    trace = random_trace(80, layers=3, experts=12, seed=3)
    settings: dict[str, Any] = {"policy__depth": 2, "policy__prefetch": "oracle"}
    wasted = [
        run_of(
            trace, memory__slots=8, policy__prefetch_params={"precision": p}, **settings
        ).result.wasted_bytes_per_token
        for p in (1.0, 0.5, 0.2)
    ]
    assert wasted == sorted(wasted) and wasted[-1] > 2 * wasted[0]


@pytest.mark.parametrize("prefetch", ["draft-early", "draft-late", "draft-first", "continuous"])
def test_a_faithful_draft_with_ample_slots_is_never_wasted(prefetch: str) -> None:
    trace = random_trace(60, layers=3, fidelity=1.0, acceptance=1.0, seed=4)
    r = ample(trace, policy__prefetch=prefetch, policy__depth=4)
    assert r.prefetch_loads > 0 and r.wasted_prefetches == 0


def test_a_later_plan_knows_more() -> None:
    """From the whole draft more is prefetched in time than from its first fifth."""
    trace = random_trace(80, layers=3, experts=16, fidelity=1.0, locality=0.3, seed=5)
    misses = {
        name: ample(trace, policy__prefetch=name, policy__depth=6, policy__eviction="lru").misses
        for name in ("none", "draft-early", "draft-late", "continuous")
    }
    assert misses["none"] > misses["draft-early"] > misses["draft-late"]
    assert misses["draft-late"] >= misses["continuous"]


def test_streaming_demands_whole_layers() -> None:
    trace = random_trace(6, layers=4, experts=6, seed=6)
    run = run_of(
        trace,
        policy__prefetch="stream",
        policy__eviction="hot-lru",
        memory__layout="global",
        memory__slots=5,
    )
    assert run.result.demands == 6 * 4 * 6
    s = run.offloader.state
    # 20 slots less two layers of streaming room: one whole layer stays.
    assert s.hot == [1] * 6 + [0] * 18
    loaded = [load.expert for load in loads_of(run)]
    assert min(loaded) >= 6
    # Whole layers in order, over and over.
    assert loaded[:18] == list(range(6, 24))


def test_a_hot_set_is_never_evicted_by_prefetch() -> None:
    run = run_of(
        random_trace(60, experts=10, seed=7),
        policy__prefetch="continuous",
        policy__eviction="hot-lru",
        policy__depth=4,
        memory__slots=4,
    )
    hot = run.offloader.state.hot
    assert sum(hot) == 2 * 3
    victims = [load.victim for load in loads_of(run) if load.kind is LoadKind.PREFETCH]
    assert len(victims) > 20
    assert not any(hot[victim] for victim in victims if victim >= 0)


def test_a_prefetch_is_not_repeated_for_what_is_there() -> None:
    offloader = told("continuous")
    make_resident(offloader, [1, E + 1])
    offloader.begin_window(0, 4)
    draft(offloader, [1, E + 1, E + 2])
    assert prefetched(offloader) == [E + 2]
    finish(offloader, [])


def test_a_window_may_run_off_the_end_of_the_text() -> None:
    ids = [[[0]], [[1]], [[2]]]
    r = run_of(
        paired_trace(ids, ids, True, experts=3),
        memory__slots=1,
        policy__prefetch="oracle",
        policy__depth=8,
    ).result
    assert r.committed_tokens == 3
