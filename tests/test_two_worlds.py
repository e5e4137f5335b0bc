"""One schedule, two worlds: what a clock-bound run decided, a clockless replay decides again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from routes import EVICTIONS, PREFETCHES, random_trace, serve, setup_of

from specter_sim.offload.decode import decode, prefill
from specter_sim.offload.journal import Divergence, Entry, Journal, replay
from specter_sim.offload.offloader import Offloader, Rules
from specter_sim.policies.plan import add_to_plan, clear_plan
from specter_sim.policies.prefetch import PrefetchRule
from specter_sim.policies.state import State
from specter_sim.setup import Setup
from specter_sim.setup.text import accepted_runs
from specter_sim.sim.traced_model import Routes, read_routes
from specter_sim.types import Copied, DraftStep, Load


class CopyThread:
    """A real device: a thread copies bytes, one load at a time, by the wall clock."""

    def __init__(self, copy_s: float, queue_depth: int) -> None:
        self.on_completion: Callable[[], object] = lambda: None
        self._copy_s, self._queue_depth = copy_s, queue_depth
        self._began_s = time.perf_counter()
        self._submitted: queue.Queue[Load | None] = queue.Queue()
        self._finished: queue.Queue[Copied] = queue.Queue()
        self._in_flight = 0
        self._host, self._slots = bytearray(b"\1" * 4096), bytearray(4096)
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def now(self) -> float:
        return time.perf_counter() - self._began_s

    def can_start(self) -> bool:
        return self._in_flight < self._queue_depth

    def start(self, load: Load) -> None:
        self._in_flight += 1
        self._submitted.put(load)

    def poll(self) -> Sequence[Copied]:
        arrived = []
        while not self._finished.empty():
            arrived.append(self._finished.get())
        self._in_flight -= len(arrived)
        return arrived

    def wait(self) -> Sequence[Copied]:
        assert self._in_flight > 0, "the schedule hangs"
        first = self._finished.get(timeout=10)
        self._in_flight -= 1
        return [first, *self.poll()]

    def compute(self, seconds: float) -> None:
        """The model computes; copies that finish meanwhile feed the link again."""
        ends_s = self.now() + seconds
        while self.now() < ends_s:
            time.sleep(seconds / 4)
            if not self._finished.empty():
                self.on_completion()

    def close(self) -> None:
        self._submitted.put(None)
        self._thread.join()

    def _copy(self) -> None:
        while (load := self._submitted.get()) is not None:
            began_s = time.perf_counter()
            self._slots[:] = self._host
            time.sleep(self._copy_s)
            self._finished.put(Copied(load, time.perf_counter() - began_s))


class SleepingModel:
    """A model that takes real time and routes as recorded."""

    def __init__(self, routes: Routes, device: CopyThread, last: int) -> None:
        self._routes, self._device, self._last = routes, device, last
        self._position, self._tokens = 0, 1

    @property
    def layers(self) -> int:
        return self._routes.layers

    @property
    def experts(self) -> int:
        return self._routes.experts

    def begin_prompt(self, tokens: int) -> None:
        self._tokens = tokens

    def end_prompt(self) -> None:
        self._position, self._tokens = self._tokens, 1

    def finished(self) -> bool:
        return self._position >= self._last

    def position(self) -> int:
        return self._position

    def limit(self) -> int:
        return self._last - self._position - 1

    def draft(self, depth: int) -> Iterator[DraftStep]:
        self._tokens = depth + 1
        for step in range(1, depth + 1):
            began_s = self._device.now()
            self._device.compute(2e-4)
            routes = self._routes.draft[self._position + step - 1]
            yield DraftStep(step, routes, self._device.now() - began_s)

    def target_pass(self, visit: Callable[[int], object]) -> None:
        for layer in range(self.layers):
            self._device.compute(2e-4)
            visit(layer)

    def route(self, layer: int) -> Sequence[int]:
        rows = self._routes.target[self._position : self._position + self._tokens]
        return sorted({expert for row in rows for expert in row[layer]})

    def hints(self, layer: int) -> Sequence[int]:
        if not self._routes.gate or layer + 1 >= self.layers:
            return ()
        rows = self._routes.gate[self._position : self._position + self._tokens]
        return sorted({expert for row in rows for expert in row[layer + 1]})

    def run(self, layer: int, experts: Sequence[int]) -> None:
        self._device.compute(1e-4 * len(experts))

    def verify(self) -> int:
        accepted = min(self._tokens - 1, self._routes.accepted_run[self._position])
        self._position += accepted + 1
        self._tokens = 1
        return accepted


def wall_clock_run(setup: Setup, rules: Rules) -> Journal:
    """Prefill and decode by the wall clock; what the offloader was told and asked."""
    journal = Journal()
    offloader = Offloader(setup.new_state(), rules, journal)
    device = CopyThread(copy_s=3e-4, queue_depth=2)
    routes = read_routes(setup.trace, setup.text.accepted.tolist(), use_gate=True)
    model = SleepingModel(routes, device, setup.trace.num_positions)
    grouped = setup.config.experts.grouped
    model.begin_prompt(4)
    prefill(model, device, offloader, 4, grouped=grouped)
    model.end_prompt()
    decode(model, device, offloader, grouped=grouped)
    device.close()
    assert model.finished()
    return journal


def run_setup(eviction: str = "lru", prefetch: str = "none", **given: Any) -> Setup:
    given.setdefault("policy__depth", 3)
    layout = "global" if prefetch == "stream" else "per-layer"
    return setup_of(
        random_trace(24, layers=3, prompt=5, seed=1),
        policy__eviction=eviction,
        policy__prefetch=prefetch,
        memory__layout=layout,
        **given,
    )


def loads_in(journal: Journal) -> int:
    return sum(1 for e in journal if e.call == "next_load" and e.answer is not None)


@pytest.mark.parametrize("prefetch", [*PREFETCHES, "stream"])
@pytest.mark.parametrize("depth", ["3", "governor"])
def test_a_simulated_run_replays(prefetch: str, depth: str) -> None:
    setup = run_setup("predicted", prefetch, policy__depth=depth)
    run = serve(setup)
    assert loads_in(run.journals[0]) > 20
    assert replay(run.journals[0], Offloader(setup.new_state(), setup.rules)) is None


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("layout", ["per-layer", "global"])
def test_a_simulated_run_replays_under_every_eviction(eviction: str, layout: str) -> None:
    trace = random_trace(24, sequences=2, seed=2)
    setup = setup_of(
        trace,
        policy__eviction=eviction,
        policy__prefetch="continuous",
        policy__depth=3,
        policy__demand="staging",
        memory__staging_slots=2,
        memory__layout=layout,
    )
    run = serve(setup)
    assert replay(run.journals[0], Offloader(setup.new_state(), setup.rules)) is None


@pytest.mark.parametrize("prefetch", ["none", "gate", "draft-early", "paper", "continuous"])
@pytest.mark.parametrize("depth", ["4", "governor"])
def test_a_wall_clock_run_replays(prefetch: str, depth: str) -> None:
    """Its inputs hold real durations; the decisions follow from them alone."""
    setup = run_setup("predicted", prefetch, policy__depth=depth)
    journal = wall_clock_run(setup, setup.rules)
    assert loads_in(journal) > 20
    assert replay(journal, Offloader(setup.new_state(), setup.rules)) is None


def test_a_wall_clock_run_replays_one_by_one() -> None:
    setup = run_setup("lru", "paper", experts__grouped=False, memory__initial="highest")
    journal = wall_clock_run(setup, setup.rules)
    assert replay(journal, Offloader(setup.new_state(), setup.rules)) is None


# --- policies that look at a clock


def evicts_by_the_clock(s: State, index: int) -> float:
    return float((time.perf_counter_ns() // 100 + index * 7919) % 101)


def plans_by_the_clock(s: State, m: Any, step: int, seconds: float) -> None:
    clear_plan(s)
    for index in range(s.layers * s.experts):
        if (time.time_ns() // 1000 + index) % 3 == 0:
            add_to_plan(s, index)


def with_clock(setup: Setup, what: str) -> Rules:
    if what == "eviction":
        return replace(setup.rules, victim_key=evicts_by_the_clock)
    return replace(setup.rules, prefetch=PrefetchRule(drafted=plans_by_the_clock))


@pytest.mark.parametrize("what", ["eviction", "prefetch"])
def test_a_policy_that_reads_a_clock_is_caught(what: str) -> None:
    setup = run_setup()
    rules = with_clock(setup, what)
    for journal in (wall_clock_run(setup, rules), serve(replace(setup, rules=rules)).journals[0]):
        found = replay(journal, Offloader(setup.new_state(), rules))
        assert isinstance(found, Divergence)
        assert found.entry.call == "next_load"
        assert journal.entries[found.place] == found.entry
        assert found.answer != found.entry.answer


def test_a_changed_answer_is_found_where_it_is() -> None:
    setup = run_setup("lru", "continuous")
    journal = serve(setup).journals[0]
    places = [i for i, e in enumerate(journal) if e.call == "next_load" and e.answer is not None]
    place = places[len(places) // 2]
    answer = journal.entries[place].answer
    journal.entries[place] = Entry("next_load", (), (answer, "tampered"))
    found = replay(journal, Offloader(setup.new_state(), setup.rules))
    assert found is not None and found.place == place and found.answer == answer


def test_a_journal_of_other_rules_diverges() -> None:
    setup, other = run_setup("lru"), run_setup("fifo")
    found = replay(serve(setup).journals[0], Offloader(other.new_state(), other.rules))
    assert found is not None


def test_a_journal_costs_nothing_when_nobody_asks() -> None:
    setup = run_setup()
    assert Offloader(setup.new_state(), setup.rules).journal is None


def test_accepted_runs_end_with_their_sequence() -> None:
    kept = [True, True, False, True, True, True]
    assert accepted_runs(kept, [0, 6]) == [2, 1, 0, 2, 1, 0]
    assert accepted_runs(kept, [0, 2, 6]) == [1, 0, 0, 2, 1, 0]
