"""The paper's planner: boundaries, phases, choice and estimates, as its artifact behaves."""

from __future__ import annotations

import pytest
from routes import drain, finish, loads_of, make_resident, offloader_of, random_trace, run_of

from specter_sim.offload.offloader import Offloader
from specter_sim.policies.paper_planner import BANDWIDTH, BOUNDARY, DRAFT_S, PHASE, new_memory
from specter_sim.policies.state import new_state
from specter_sim.types import DraftStep, LoadKind

E = 8


def planner(depth: int, slots: int = 4, load_bytes: float = 1e6, layers: int = 1) -> Offloader:
    offloader = offloader_of(
        new_state(layers, E, 2, [slots] * layers),
        prefetch="paper",
        depth=depth,
        memory=tuple(new_memory(load_bytes)),
    )
    offloader.begin_window(0, depth)
    return offloader


def plans(
    offloader: Offloader,
    depth: int,
    routes: list[list[int]],
    seconds: float,
    copy_s: float = 1e-4,
) -> list[int]:
    """The draft steps after which the plan was made anew."""
    made = []
    for step in range(1, depth + 1):
        before = phase_and_boundary(offloader)
        offloader.drafted(DraftStep(step, routes[(step - 1) % len(routes)], seconds))
        if phase_and_boundary(offloader) != before:
            made.append(step)
        finish(offloader, drain(offloader), copy_s)
    return made


def phase_and_boundary(offloader: Offloader) -> tuple[float, float]:
    """Every plan moves at least one of them."""
    memory = offloader._prefetch_memory
    return memory[PHASE], memory[BOUNDARY]


@pytest.mark.parametrize(("depth", "first"), [(16, 3), (8, 1), (4, 1), (1, 1), (32, 6), (10, 2)])
def test_first_plan_after_a_fifth_of_the_draft(depth: int, first: int) -> None:
    assert plans(planner(depth), depth, [[0]], seconds=1e-3)[0] == first


@pytest.mark.parametrize(("depth", "first"), [(16, 3), (8, 1)])
def test_one_plan_a_window_when_copies_outlast_the_draft(depth: int, first: int) -> None:
    # 52 loads of 17 MB at 12 GB/s take 75 ms; the rest of the draft at most 16.
    routes = [layer * E + expert for layer in range(26) for expert in (0, 1)]
    slow = planner(depth, load_bytes=17.3e6, layers=26)
    assert plans(slow, depth, [routes], seconds=1e-3) == [first]


def test_chunks_follow_the_estimates() -> None:
    """Each plan's next boundary lies as far off as its copies are expected to take."""
    offloader = planner(16, slots=8, load_bytes=12e6)  # one load: 1 ms by the prior
    # 1 ms draft steps keep the draft estimate at its prior. 2 loads -> 2 steps, then the plan
    # grows by one load each time, which takes 1 step.
    routes = [[0, 1]] * 3 + [[2], [3], [4], [5], [6]] + [[0]] * 8
    made = plans(offloader, 16, routes, seconds=1e-3, copy_s=1e-3)  # as the priors say
    # After 3: {0, 1}, 2 loads, 2 steps -> 5: 2 and 3, 2 loads -> 7: 4 and 5 -> 9: 6, one step
    # -> 10 and every step from there, with nothing left to load.
    assert made == [3, 5, 7, 9, 10, 11, 12, 13, 14, 15]


def test_part_of_a_step_is_a_whole_step() -> None:
    """1.5 draft steps of copying put the next boundary two steps off."""
    offloader = planner(16, slots=8, load_bytes=18e6)
    assert plans(offloader, 16, [[0]], seconds=1e-3, copy_s=1.5e-3)[:3] == [3, 5, 6]


def test_several_plans_when_copies_are_fast() -> None:
    assert plans(planner(16), 16, [[0, 1]], seconds=1e-2) == list(range(3, 16))


def test_a_full_plan_ends_the_planning_and_later_routes_are_ignored() -> None:
    offloader = planner(8, slots=2)
    offloader.drafted(DraftStep(1, [4, 5], 1e-3))
    assert [load.expert for load in drain(offloader)] == [4, 5]
    for step in range(2, 9):
        offloader.drafted(DraftStep(step, [0, 1], 1e-3))
        assert drain(offloader) == []
    assert [i for i in range(E) if offloader.state.planned[i]] == [4, 5]


def test_only_full_in_every_layer_counts_as_full() -> None:
    offloader = planner(16, slots=2, layers=2)
    assert len(plans(offloader, 16, [[0, 1, E]], seconds=1e-2)) > 1


def test_every_window_starts_cold() -> None:
    offloader = planner(8, slots=2)
    offloader.drafted(DraftStep(1, [4, 5], 1e-3))
    finish(offloader, drain(offloader))
    offloader.state.predicted[:] = [0] * E
    offloader.begin_window(8, 8)
    offloader.drafted(DraftStep(1, [0, 1], 1e-3))
    assert [load.expert for load in drain(offloader)] == [0, 1]


def test_top_m_by_count_ties_to_the_lower_id_and_nothing_unseen() -> None:
    offloader = planner(16, slots=3)
    offloader.drafted(DraftStep(1, [6, 7], 1e-3))
    offloader.drafted(DraftStep(2, [5, 7], 1e-3))
    assert drain(offloader) == []
    offloader.drafted(DraftStep(3, [2, 7], 1e-3))
    # 7 three times; 2, 5 and 6 once, and two places are left.
    assert [load.expert for load in drain(offloader)] == [7, 2, 5]
    sparse = planner(16, slots=4)
    for step in (1, 2, 3):
        sparse.drafted(DraftStep(step, [3], 1e-3))
    assert [load.expert for load in drain(sparse)] == [3]


def test_layers_are_submitted_in_order() -> None:
    offloader = planner(8, slots=2, layers=3)
    offloader.drafted(DraftStep(1, [2 * E + 1, E + 2, 3], 1e-3))
    assert [load.expert for load in drain(offloader)] == [3, E + 2, 2 * E + 1]


def test_victims_are_residents_outside_the_plan_in_lru_order() -> None:
    offloader = planner(8, slots=4)
    make_resident(offloader, [0, 1, 2, 3])  # 0 the least recent
    offloader.drafted(DraftStep(1, [0, 5, 6], 1e-3))
    loads = drain(offloader)
    assert [(load.expert, load.victim) for load in loads] == [(5, 1), (6, 2)]
    assert all(load.kind is LoadKind.PREFETCH for load in loads)


def test_the_whole_plan_becomes_most_recently_used() -> None:
    offloader = planner(8, slots=4)
    make_resident(offloader, [0, 1, 2, 3])
    offloader.drafted(DraftStep(1, [0, 1], 1e-3))
    offloader.demand(0, [5, 6])
    assert [load.victim for load in drain(offloader)] == [2, 3]


def test_estimates_are_smoothed_from_their_priors() -> None:
    offloader = planner(8, slots=2, load_bytes=1e6)
    offloader.drafted(DraftStep(1, [4, 5], 3e-3))
    loads = drain(offloader)
    finish(offloader, loads[:1], 1e-3)
    memory = offloader._prefetch_memory
    assert memory[DRAFT_S] == pytest.approx(0.75 * 1e-3 + 0.25 * 3e-3)
    assert memory[BANDWIDTH] == pytest.approx(0.75 * 12e9 + 0.25 * 1e9)
    finish(offloader, loads[1:], 1e-3)
    assert memory[BANDWIDTH] == pytest.approx(0.75 * (0.75 * 12e9 + 0.25 * 1e9) + 0.25 * 1e9)
    offloader.begin_request()
    assert offloader._prefetch_memory[BANDWIDTH] == 12e9
    assert offloader._prefetch_memory[DRAFT_S] == 1e-3


def test_estimates_survive_a_window_but_not_a_request() -> None:
    trace = random_trace(20, sequences=2, seed=1)
    run = run_of(trace, policy__prefetch="paper", policy__depth=4)
    began = [i for i, e in enumerate(run.journals[0]) if e.call == "begin_request"]
    assert len(began) == 2  # the offloader's first and the second prompt's


@pytest.mark.parametrize("bandwidth", ["5 MB/s", "50 MB/s"])
def test_verification_waits_for_every_prefetch(bandwidth: str) -> None:
    run = run_of(
        random_trace(40, seed=2),
        policy__prefetch="paper",
        policy__depth=8,
        machine__link_bandwidth=bandwidth,
    )
    flying: set[int] = set()
    for call, args, answer in run.journals[0]:
        if call == "next_load" and answer is not None and answer[2] == LoadKind.PREFETCH:  # type: ignore[index]
            flying.add(answer[0])  # type: ignore[index]
        elif call == "copied":
            flying.discard(args[0].load.expert)  # type: ignore[attr-defined]
        elif call == "demand":
            assert not flying
    r = run.result
    assert r.late_prefetches == 0 and r.stall_late_s == 0
    assert r.prefetch_loads > 0 and r.stall_join_s > 0


def test_the_last_proposals_route_is_never_seen() -> None:
    """A window of depth k observes k draft inputs; what only the last proposal needs is missed."""
    run = run_of(random_trace(40, seed=3), policy__prefetch="paper", policy__depth=4)
    windows = run.served[0].windows
    told = [e for e in run.journals[0] if e.call == "drafted"]
    assert len(told) == sum(w.outcome.depth for w in windows)
    assert loads_of(run)
