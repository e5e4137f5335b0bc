"""The SimPy world against what can be worked out by hand, and that nothing depends on luck."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import (
    EVICTIONS,
    PREFETCHES,
    fixed_costs,
    paired_trace,
    random_trace,
    run_of,
    serve,
    setup_of,
    unions,
    with_link,
)

from specter_sim.policies import PREFETCH
from specter_sim.results import Span
from specter_sim.sim import simulate
from specter_sim.sim.host import HostMemory
from specter_sim.sim.link import LinkProcess
from specter_sim.types import Copied, Load, LoadKind

MB = 1_000_000


# --- closed forms of a run


@pytest.mark.parametrize("depth", ["never", "3"])
def test_all_resident_takes_exactly_the_compute_time(depth: str) -> None:
    setup = setup_of(random_trace(30), memory__slots=8, memory__initial="highest")
    setup = setup_of(
        random_trace(30), memory__slots=8, memory__initial="highest", policy__depth=depth
    )
    run = serve(fixed_costs(setup, draft_s=2.0, layer_s=3.0, end_s=5.0, expert_s=0.25))
    r, windows = run.result, run.served[0].windows
    drafted = sum(w.outcome.depth for w in windows)
    expected = 2.0 * drafted + len(windows) * (3 * 3.0 + 5.0) + 0.25 * r.demands
    assert r.run_s == pytest.approx(expected, rel=1e-12)
    assert r.misses == r.loads == 0 and r.hit_rate == 1.0
    assert r.stall_demand_s == r.stall_late_s == r.stall_join_s == 0
    assert r.distance_to_bound == pytest.approx(1.0)


@pytest.mark.parametrize("prefetch", ["none", "continuous", "paper"])
def test_an_infinitely_fast_link_never_stalls(prefetch: str) -> None:
    setup = setup_of(random_trace(30), memory__slots=2, policy__prefetch=prefetch, policy__depth=3)
    setup = with_link(fixed_costs(setup, draft_s=1.0, layer_s=1.0, expert_s=0.5), 1e30)
    r = serve(setup).result
    assert r.loads > 0
    assert r.stall_demand_s + r.stall_late_s + r.stall_join_s < 1e-12
    assert r.run_s == pytest.approx(r.draft_s + r.compute_s, rel=1e-12)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("depth", ["never", "4"])
def test_one_slot_from_cold_with_free_compute_is_copies_end_to_end(
    grouped: bool, depth: str
) -> None:
    """Union x copy time per layer, less what the one slot still holds from the last window."""
    trace = random_trace(20, layers=2, experts=6, acceptance=1.0, seed=4)
    setup = setup_of(trace, memory__slots=1, policy__depth=depth, experts__grouped=grouped)
    run = serve(with_link(fixed_costs(setup, load_bytes=MB), 1e9, latency_s=1e-4))
    copy_s = 1e-3 + 1e-4
    first = sum(map(len, unions(trace, 0, run.served[0].windows[0].outcome.depth + 1)))
    assert run.served[0].windows[0].ended_s == pytest.approx(first * copy_s)
    r = run.result
    assert r.run_s == pytest.approx(r.misses * copy_s)
    assert r.misses >= r.demands - len(run.served[0].windows) * 2


def test_copies_hide_behind_the_draft() -> None:
    """What the draft announces early enough costs nothing; the rest is the longer of the two."""
    ids = [[[2 * place % 8, (2 * place + 1) % 8]] for place in range(8)]
    trace = paired_trace(ids, ids, True, experts=8)
    setup = setup_of(trace, memory__slots=8, policy__prefetch="continuous", policy__depth=3)
    for draft_s in (0.5, 2.0, 5.0):
        timed = with_link(fixed_costs(setup, draft_s=draft_s, load_bytes=MB), 1e6)  # 1 s a copy
        first = serve(timed).served[0].windows[0]
        # 6 experts announced two a draft step, the last two demanded after three steps.
        announced = max(3 * draft_s + 2, draft_s + 6)
        assert first.ended_s == pytest.approx(announced + 2 if draft_s < 2 else 3 * draft_s + 4)


def test_prefill_of_a_long_prompt_pays_each_expert_once() -> None:
    trace = random_trace(60, layers=2, experts=8, prompt=41, locality=0.0, seed=1)
    setup = with_link(fixed_costs(setup_of(trace, memory__slots=2), load_bytes=MB), 1e9)
    need = sum(map(len, unions(trace, 0, 40)))
    assert serve(setup).result.prefill_s == pytest.approx(need * 1e-3)


def test_tpot_has_one_formula() -> None:
    trace = random_trace(30, sequences=2, acceptance=1.0, seed=3)
    run = run_of(trace, policy__depth=3)
    spans = [(s.windows[0].ended_s, s.windows[-1].ended_s) for s in run.served]
    seconds = sum(last - first for first, last in spans)
    assert [s.windows[0].outcome.accepted for s in run.served] == [3, 3]
    later = 60 - 2 * 4
    assert run.result.tpot_s == pytest.approx(seconds / later)
    assert run.result.tpot_paper_s == pytest.approx(seconds / (60 - 2))
    assert run.result.tpot_p50_s <= run.result.tpot_p99_s


def test_the_timeline_is_the_run() -> None:
    spans: list[Span] = []
    r = simulate(setup_of(random_trace(20), policy__depth=2), spans)
    gpu = [s for s in spans if s.track == "gpu"]
    link = [s for s in spans if s.track == "link"]
    assert sum(s.end_s - s.start_s for s in gpu) == pytest.approx(r.draft_s + r.compute_s)
    assert sum(s.end_s - s.start_s for s in link) == pytest.approx(r.link_busy_s)
    for track in (gpu, link):
        for before, after in pairwise(track):
            assert after.start_s >= before.end_s - 1e-15


def test_the_timeline_changes_nothing() -> None:
    setup = setup_of(random_trace(20), policy__depth=2)
    assert simulate(setup) == simulate(setup, [])


def test_cold_requests_do_not_see_each_other() -> None:
    trace = random_trace(64, sequences=2, seed=8)
    twice = replace(trace)
    together = run_of(trace, trace__between="cold", memory__slots=4)
    alone = [
        run_of(twice.select([i]), trace__between="cold", memory__slots=4).result for i in (0, 1)
    ]
    assert together.result.loads == sum(r.loads for r in alone)
    warm = run_of(trace, trace__between="warm", memory__slots=4)
    assert warm.result.loads < together.result.loads


# --- the link


class Line:
    """A link process, its arrivals, and nothing else."""

    def __init__(
        self,
        latency_s: float = 0.0,
        queue_depth: int = 1,
        bytes_per_s: float = 1e9,
        host_bytes_per_s: float = 1e30,
        pinned: bool = True,
        bounce_bytes_per_s: float = 1e30,
        granularity_bytes: int = 1 << 40,
        expand_s: float = 0.0,
    ) -> None:
        link = replace(
            setup_of(random_trace(4)).machine.link,
            latency_s=latency_s,
            queue_depth=queue_depth,
            bytes_per_s=bytes_per_s,
            granularity_bytes=granularity_bytes,
        )
        self.env = simpy.Environment()
        self.host = HostMemory(self.env, host_bytes_per_s)
        self.link = LinkProcess(
            self.env,
            link,
            self.host,
            MB,
            expand_s,
            pinned=lambda index: pinned,
            bounce_bytes_per_s=bounce_bytes_per_s,
            name=str,
            timeline=None,
        )
        self.arrivals: list[float] = []
        self.copied: list[Copied] = []
        self.left = 0
        self.link.on_arrival = self._arrive

    def send(self, loads: int) -> list[float]:
        """Keep the queue full until ``loads`` have arrived; when each did."""
        self.left = loads
        self._fill()
        self.env.run()
        return self.arrivals

    def _fill(self) -> None:
        while self.left and self.link.can_start():
            self.left -= 1
            self.link.start(Load(self.left, 0, LoadKind.DEMAND, -1))

    def _arrive(self, copied: Copied) -> None:
        self.arrivals.append(self.env.now)
        self.copied.append(copied)
        self._fill()


def test_one_at_a_time_pays_every_latency() -> None:
    assert Line(latency_s=2e-4).send(3) == pytest.approx([1.2e-3, 2.4e-3, 3.6e-3])


@given(
    latency_s=st.floats(0, 5e-3),
    queue_depth=st.integers(1, 6),
    loads=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_a_queue_hides_latency(latency_s: float, queue_depth: int, loads: int) -> None:
    """A load begins when the one before it is through and its own latency is over."""
    expected: list[float] = []
    for number in range(loads):
        submitted = expected[number - queue_depth] if number >= queue_depth else 0.0
        before = expected[-1] if expected else 0.0
        expected.append(max(before, submitted + latency_s) + 1e-3)
    line = Line(latency_s=latency_s, queue_depth=queue_depth)
    assert line.send(loads) == pytest.approx(expected)
    assert line.link.busy_s == pytest.approx(expected[-1])


def test_a_load_cut_into_pieces_pays_their_latencies() -> None:
    line = Line(latency_s=2e-4, granularity_bytes=MB // 4)
    assert line.send(2) == pytest.approx([1e-3 + 4 * 2e-4, 2 * (1e-3 + 4 * 2e-4)])


@pytest.mark.parametrize("granularity_bytes", [MB, MB // 3, MB // 10])
@pytest.mark.parametrize("queue_depth", [1, 2, 4])
def test_one_load_takes_the_links_closed_form(granularity_bytes: int, queue_depth: int) -> None:
    line = Line(3e-5, queue_depth, granularity_bytes=granularity_bytes)
    assert line.send(1) == pytest.approx([line.link._link.copy_s(MB)])


def test_seconds_of_a_copy_leave_its_wait_in_the_queue_out() -> None:
    line = Line(latency_s=1e-4, queue_depth=4)
    line.send(4)
    assert [c.seconds for c in line.copied] == pytest.approx([1.1e-3, 1e-3, 1e-3, 1e-3])


def test_slow_host_memory_limits_the_link() -> None:
    assert Line(host_bytes_per_s=0.5e9).send(2) == pytest.approx([2e-3, 4e-3])


def test_pageable_loads_pass_a_bounce_buffer() -> None:
    line = Line(pinned=False, bounce_bytes_per_s=0.5e9)
    assert line.send(2) == pytest.approx([3e-3, 6e-3])
    overlapped = Line(pinned=False, bounce_bytes_per_s=0.5e9, queue_depth=2)
    # The CPU bounces the next load while the link moves this one.
    assert overlapped.send(3) == pytest.approx([3e-3, 5e-3, 8e-3 - 1e-3])


def test_a_bounce_and_a_copy_share_host_memory() -> None:
    # Bounce: 2 bytes of traffic a byte at 0.5 GB/s = 1 GB/s; copy: 1 GB/s; the host has 1 GB/s.
    line = Line(pinned=False, bounce_bytes_per_s=0.5e9, queue_depth=2, host_bytes_per_s=1e9)
    first, second = line.send(2)
    # While bounce 0 and bounce 1 run alone they get all; with copy 0 beside bounce 1 both get half.
    assert first == pytest.approx(2e-3 + 2e-3)
    assert second == pytest.approx(4e-3 + 1e-3 + 1e-3)


def test_expansion_delays_arrival_but_not_the_link() -> None:
    line = Line(queue_depth=2, expand_s=5e-4)
    assert line.send(3) == pytest.approx([1.5e-3, 2.5e-3, 3.5e-3])
    slow = Line(queue_depth=2, expand_s=3e-3)
    assert slow.send(3) == pytest.approx([4e-3, 7e-3, 10e-3])


def test_host_memory_shares_in_proportion() -> None:
    env = simpy.Environment()
    host = HostMemory(env, 3e9)
    ended: dict[str, float] = {}

    def flow(name: str, size: float, rate: float, begins: float) -> Any:
        yield env.timeout(begins)
        yield host.transfer(size, rate)
        ended[name] = env.now

    env.process(flow("a", 4e6, 4e9, 0.0))
    env.process(flow("b", 2e6, 2e9, 0.0))
    env.process(flow("late", 1e6, 1e9, 10.0))
    env.run()
    # 6 GB/s are asked of 3: both get half of what they ask for and end together.
    assert ended["a"] == pytest.approx(2e-3)
    assert ended["b"] == pytest.approx(2e-3)
    assert ended["late"] == pytest.approx(10.001)


@given(
    flows=st.lists(
        st.tuples(st.floats(1, 100), st.floats(0.5, 20), st.floats(0, 30)), min_size=1, max_size=6
    ),
    bandwidth=st.floats(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_host_memory_moves_every_byte_no_faster_than_it_can(
    flows: list[tuple[float, float, float]], bandwidth: float
) -> None:
    env = simpy.Environment()
    host = HostMemory(env, bandwidth)
    ended = []

    def flow(size: float, rate: float, begins: float) -> Any:
        yield env.timeout(begins)
        yield host.transfer(size, rate)
        ended.append((size, rate, begins, env.now))

    for item in flows:
        env.process(flow(*item))
    env.run()
    assert len(ended) == len(flows)
    for size, rate, begins, end in ended:
        assert end - begins >= size / min(rate, bandwidth) * (1 - 1e-9)
    first = min(item[2] for item in flows)
    total = sum(item[0] for item in flows)
    assert max(item[3] for item in ended) >= first + total / bandwidth * (1 - 1e-9)


# --- determinism


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("prefetch", ["continuous", "paper", "oracle"])
def test_the_same_run_twice(eviction: str, prefetch: str) -> None:
    setup = setup_of(
        random_trace(30, seed=1),
        policy__eviction=eviction,
        policy__prefetch=prefetch,
        policy__depth=3,
    )
    first, second = serve(setup), serve(setup)
    assert first.result == second.result
    assert first.journals == second.journals


SCRIPT = """
from routes import EVICTIONS, PREFETCHES, random_trace, run_of
trace = random_trace(24, sequences=2, prompt=3, seed=5)
for eviction in EVICTIONS:
    print(run_of(trace, policy__eviction=eviction, policy__depth=3).result)
for prefetch in PREFETCHES:
    for depth in ("3", "governor"):
        print(run_of(trace, policy__prefetch=prefetch, policy__depth=depth).result)
"""


def test_other_processes_with_other_hash_seeds_agree() -> None:
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join([str(tests), *(p for p in sys.path if p)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1234")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("Result(") == len(EVICTIONS) + 2 * len(PREFETCHES)


def test_seeds_are_parameters() -> None:
    trace = random_trace(60, experts=10, seed=2)
    loads = [
        run_of(trace, policy__eviction="random", trace__seed=seed).result for seed in (1, 1, 2)
    ]
    assert loads[0] == loads[1] != loads[2]


# --- every policy of the catalogue


@pytest.mark.parametrize("prefetch", sorted(PREFETCH))
@pytest.mark.parametrize("depth", ["3", "governor", "profile"])
def test_every_policy_runs(prefetch: str, depth: str) -> None:
    r = run_of(
        random_trace(70, seed=4),
        policy__prefetch=prefetch,
        policy__depth=depth,
        memory__layout="global" if prefetch == "stream" else "per-layer",
    ).result
    assert r.committed_tokens == 70
    assert all(value == value for value in asdict(r).values())  # no NaN
