"""The decode loop: it always ends, accounts for everything, and runs what is ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import (
    EVICTIONS,
    PREFETCHES,
    fixed_costs,
    loads_of,
    paired_trace,
    random_trace,
    run_of,
    serve,
    setup_of,
    unions,
    with_link,
)

from specter_sim.offload.journal import Journal
from specter_sim.policies import PREFETCH
from specter_sim.results import Result
from specter_sim.setup import Request
from specter_sim.sim import Run, World
from specter_sim.types import Load, LoadKind

DEPTHS = ("never", "1", "3", "7", "governor")


def check_conservation(run: Run) -> None:
    """What must hold of every run, whatever it decided."""
    r, offloader = run.result, run.offloader
    assert r.demands == r.hits + r.pending_hits + r.misses
    assert r.loads == r.demand_loads + r.prefetch_loads
    assert r.useful_prefetches + r.late_prefetches + r.wasted_prefetches == r.prefetch_loads
    assert min(r.useful_prefetches, r.late_prefetches, r.wasted_prefetches) >= 0
    assert r.demand_loads == r.misses
    split = r.demand_bytes_per_token + r.useful_bytes_per_token
    split += r.late_bytes_per_token + r.wasted_bytes_per_token
    assert split == pytest.approx(r.bytes_per_token)
    parts = (r.prefill_s, r.draft_s, r.compute_s, *stalls_of(r), r.idle_s)
    assert sum(parts) == pytest.approx(r.run_s, rel=1e-12)
    assert abs(r.idle_s) <= 1e-9 * r.run_s
    assert r.link_busy_s <= r.run_s * (1 + 1e-12)
    assert r.bound_s <= r.decode_s * (1 + 1e-12)
    assert not any(offloader.state.holds)
    for journal in run.journals:
        check_residency(journal, offloader.state.experts)


def check_residency(journal: Journal, experts: int) -> None:
    """No load evicts what is held or on its way, and no slot is given away twice."""
    flying: set[int] = set()
    held: set[int] = set()
    slots: dict[int, int] = {}
    for entry in journal:
        args: Any = entry.args
        if entry.call == "next_load" and isinstance(entry.answer, Load):
            load = entry.answer
            assert load.victim not in flying | held
            assert load.expert not in slots.values()
            assert load.victim < 0 or slots.get(load.slot, load.victim) == load.victim
            slots[load.slot] = load.expert
            flying.add(load.expert)
        elif entry.call == "copied":
            flying.remove(args[0].load.expert)
        elif entry.call == "demand":
            held = {args[0] * experts + expert for expert in args[1]}
        elif entry.call == "release":
            held.remove(args[0])
            # A staged expert leaves with its release; whoever comes next finds the slot free.
            slots = {slot: e for slot, e in slots.items() if e != args[0]}


def stalls_of(r: Result) -> tuple[float, float, float]:
    return r.stall_demand_s, r.stall_late_s, r.stall_join_s


@settings(max_examples=200, deadline=None)
@given(
    slots=st.integers(1, 6),
    eviction=st.sampled_from(EVICTIONS),
    prefetch=st.sampled_from((*PREFETCHES, "stream")),
    depth=st.sampled_from(DEPTHS),
    layout=st.sampled_from(["per-layer", "global"]),
    grouped=st.booleans(),
    staging=st.sampled_from([0, 0, 1, 2]),
    shape=st.tuples(st.integers(1, 3), st.integers(2, 6), st.integers(1, 3)),
    acceptance=st.sampled_from([0.0, 0.6, 1.0]),
    bandwidth=st.sampled_from(["1 MB/s", "10 MB/s", "100 MB/s"]),
    queue_depth=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_every_run_ends_and_adds_up(
    slots: int,
    eviction: str,
    prefetch: str,
    depth: str,
    layout: str,
    grouped: bool,
    staging: int,
    shape: tuple[int, int, int],
    acceptance: float,
    bandwidth: str,
    queue_depth: int,
    seed: int,
) -> None:
    layers, experts, top_k = shape
    trace = random_trace(
        12,
        layers,
        experts,
        min(top_k, experts),
        sequences=2,
        prompt=seed % 4,
        acceptance=acceptance,
        seed=seed,
    )
    if "gate" in PREFETCH[prefetch].needs and layers == 1:
        prefetch = "none"
    if depth == "never" and "paired" in PREFETCH[prefetch].needs:
        depth = "2"
    run = run_of(
        trace,
        memory__slots=min(slots, experts),
        memory__layout="global" if prefetch == "stream" else layout,
        memory__staging_slots=staging,
        policy__demand="staging" if staging else "resident",
        machine__link_bandwidth=bandwidth,
        machine__queue_depth=queue_depth,
        experts__grouped=grouped,
        policy__eviction=eviction,
        policy__prefetch=prefetch,
        policy__depth=depth,
    )
    check_conservation(run)
    assert run.result.committed_tokens == 2 * (12 - max(0, seed % 4 - 1))


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("depth", ["never", "5"])
def test_demands_are_the_unions_of_the_windows(grouped: bool, depth: str) -> None:
    trace = random_trace(30, prompt=0, seed=3)
    run = run_of(trace, policy__depth=depth, experts__grouped=grouped)
    place, expected = 0, 0
    for window in run.served[0].windows:
        here = unions(trace, place, window.outcome.depth + 1)
        assert window.outcome.demands == sum(map(len, here))
        expected += window.outcome.demands
        place += window.outcome.accepted + 1
    assert place == 30 and run.result.demands == expected


def test_acceptance_counts_and_length_come_out_exactly() -> None:
    accepted = [True, True, False, True, True, True, True, True, True, True]
    trace = paired_trace([[[0]]] * 10, [[[0]]] * 10, accepted, experts=2)
    run = run_of(trace, policy__depth=4, memory__slots=1)
    outcomes = [(w.outcome.depth, w.outcome.accepted) for w in run.served[0].windows]
    assert outcomes == [(4, 2), (4, 4), (1, 1)]
    r = run.result
    assert r.committed_tokens == 10
    assert r.acceptance == pytest.approx(7 / 8)
    assert r.window_utilization == pytest.approx(7 / 9)


def test_prompt_experts_are_loaded_once_a_layer_pass() -> None:
    """Even when the prompt needs more experts than there are slots."""
    trace = random_trace(60, layers=2, experts=8, prompt=41, locality=0.0, seed=1)
    need = unions(trace, 0, 40)
    assert all(len(union) > 3 for union in need)
    for grouped in (True, False):
        world = World(setup_of(trace, memory__slots=3, experts__grouped=grouped), journal=True)
        run = world.serve()
        calls = [entry for entry in run.journals[0]]
        end = next(i for i, entry in enumerate(calls) if entry.call == "end_pass")
        loads = [e.answer for e in calls[:end] if e.call == "next_load" and e.answer]
        assert len(loads) == sum(map(len, need))


def test_prefill_is_not_decoding() -> None:
    trace = random_trace(60, prompt=20, seed=2)
    r = run_of(trace).result
    assert r.committed_tokens == 60 - 19
    assert r.prefill_s > 0
    assert r.run_s == pytest.approx(r.prefill_s + r.decode_s)
    assert r.ttft_s > r.prefill_s


@pytest.mark.parametrize("expert_s", [1e-5, 5e-3])
def test_ungrouped_runs_hits_first_then_misses_in_id_order(expert_s: float) -> None:
    """The paper's order inside a layer: residents by id, then misses as they were submitted."""
    run = one_window_ungrouped(expert_s)
    releases = [e.args[0] for e in run.journals[0] if e.call == "release"][3:]
    assert releases == [2, 4, 0, 1, 3, 5]


@pytest.mark.parametrize("expert_s", [1e-5, 5e-3])
def test_each_freed_slot_takes_the_next_miss_and_the_last_misses_stay(expert_s: float) -> None:
    """Proven hits are the first to go, and what stays is the last misses by id."""
    run = one_window_ungrouped(expert_s)
    loads = loads_of(run)[3:]
    assert [load.expert for load in loads] == [0, 1, 3, 5]
    assert [load.victim for load in loads] == [6, 2, 4, 0]
    assert sorted(run.offloader.state.occupant) == [1, 3, 5]


def one_window_ungrouped(expert_s: float) -> Run:
    """Three slots hold 2, 4 and 6; then a window of three tokens needs experts 0..5."""
    ids = [[[2, 4, 6]], [[0, 1, 2]], [[2, 3, 4]], [[0, 4, 5]]]
    trace = paired_trace(ids, ids, True, experts=7)
    setup = setup_of(trace, memory__slots=3, policy__depth=2, experts__grouped=False)
    setup = replace(setup, requests=(request(0, 1), request(1, 4)))
    return serve(with_link(fixed_costs(setup, expert_s=expert_s), 1e9))


def request(start: int, last: int) -> Request:
    return Request(0, 0, 0, start, last)


def test_stalls_are_blamed_on_their_cause() -> None:
    # One layer, one expert a token, a new one each time: every window stalls on a demand.
    ids = [[[place % 4]] for place in range(8)]
    wrong = [[[(place + 2) % 4]] for place in range(8)]
    trace = paired_trace(ids, ids, True, experts=4)
    plain = timed(trace, policy__depth="never", memory__slots=1)
    assert plain.stall_demand_s > 0 and plain.stall_late_s == plain.stall_join_s == 0
    # The draft announces it too late to arrive in time.
    late = timed(trace, policy__depth=1, policy__prefetch="continuous", memory__slots=2)
    assert late.stall_late_s > 0 and late.stall_join_s == 0
    assert late.late_prefetches > 0
    # The paper's planner waits for it before verification.
    joined = timed(trace, policy__depth=1, policy__prefetch="paper", memory__slots=2)
    assert joined.stall_join_s > 0 and joined.late_prefetches == 0
    # Nothing the draft says is needed: only demands and the join are waited for.
    astray = paired_trace(ids, wrong, False, experts=4)
    wasted = timed(astray, policy__depth=1, policy__prefetch="paper", memory__slots=1)
    assert wasted.stall_join_s > 0 and wasted.stall_demand_s > 0


def timed(trace: Any, queue_depth: int = 1, **given: Any) -> Result:
    setup = fixed_costs(setup_of(trace, **given), draft_s=1e-4, layer_s=1e-4)
    return serve(with_link(setup, 1e9, queue_depth=queue_depth)).result


def test_a_late_load_is_blamed_before_a_demand() -> None:
    ids = [[[0, 1]], [[2, 3]]]
    trace = paired_trace(ids, [[[0, 2]], [[2, 3]]], False, experts=4)
    r = timed(trace, 2, policy__depth=1, policy__prefetch="continuous", memory__slots=4)
    # Window 1 needs 0..3: 0 and 2 were announced, 1 and 3 are demanded behind them.
    assert r.late_prefetches == 2 and r.misses == 2
    assert r.stall_late_s == pytest.approx(2e-3 - 1e-4, rel=1e-9)
    assert r.stall_demand_s == pytest.approx(2e-3, rel=1e-9)


# --- the same decisions, faster


def decisions(run: Run) -> list[tuple[int, int, LoadKind, int]]:
    return [tuple(load) for load in loads_of(run)]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    slots=st.integers(1, 4),
    depth=st.sampled_from(["never", "2"]),
    prefetch=st.sampled_from(["none", "draft-late", "gate"]),
    factor=st.sampled_from([1.01, 2.0, 10.0]),
    what=st.sampled_from(["link", "layer", "expert", "draft", "latency"]),
)
def test_faster_is_never_slower_when_decisions_are_equal(
    seed: int, slots: int, depth: str, prefetch: str, factor: float, what: str
) -> None:
    trace = random_trace(20, layers=2, experts=6, seed=seed)
    if depth == "never" and prefetch == "draft-late":
        prefetch = "none"
    base = setup_of(trace, memory__slots=slots, policy__depth=depth, policy__prefetch=prefetch)
    costs = {"draft_s": 3e-4, "layer_s": 5e-4, "end_s": 2e-4, "expert_s": 1e-4}
    link = {"bytes_per_s": 1e9, "latency_s": 1e-4, "queue_depth": 2}
    slow = serve(with_link(fixed_costs(base, **costs), **link))  # type: ignore[arg-type]
    if what == "link":
        link["bytes_per_s"] *= factor
    elif what == "latency":
        link["latency_s"] /= factor
    else:
        costs[f"{what}_s"] /= factor
    fast = serve(with_link(fixed_costs(base, **costs), **link))  # type: ignore[arg-type]
    if decisions(fast) == decisions(slow):
        assert fast.result.run_s <= slow.result.run_s * (1 + 1e-9)


def test_demand_runs_without_choice_do_decide_alike() -> None:
    """So the property above is about something: many of its pairs compare."""
    equal = 0
    for seed in range(20):
        setup = setup_of(random_trace(20, layers=2, experts=6, seed=seed), memory__slots=3)
        slow, fast = (serve(with_link(fixed_costs(setup, layer_s=1e-4), b)) for b in (1e9, 2e9))
        equal += decisions(slow) == decisions(fast)
        if decisions(slow) == decisions(fast):
            assert fast.result.run_s < slow.result.run_s
    assert equal >= 15
