"""Residency under every order of calls a driver may make: a state machine looks for a bad one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from routes import EVICTIONS, offloader_of

from specter_sim.policies import PREFETCH
from specter_sim.policies.state import ABSENT, LOADING, RESIDENT, WINDOW, new_state
from specter_sim.types import Copied, DraftStep, Load, LoadKind, WindowOutcome

LAYERS, EXPERTS, TOP_K, POSITIONS = 3, 5, 2, 64
ALL = LAYERS * EXPERTS
IDS = st.integers(0, EXPERTS - 1)


class Driver(RuleBasedStateMachine):
    """Any driver: windows of any depth, copies that finish in any order, releases in any order."""

    @initialize(
        slots=st.one_of(
            st.lists(st.integers(1, 3), min_size=LAYERS, max_size=LAYERS),
            st.integers(1, 8).map(lambda n: [n]),
        ),
        staging=st.sampled_from([0, 0, 1, 3]),
        eviction=st.sampled_from(EVICTIONS),
        prefetch=st.sampled_from((*PREFETCH, "continuous", "continuous", "oracle", "stream")),
        hot=st.lists(st.integers(0, 1), min_size=ALL, max_size=ALL),
        depth=st.integers(0, 5),
    )
    def build(
        self,
        slots: list[int],
        staging: int,
        eviction: str,
        prefetch: str,
        hot: list[int],
        depth: int,
    ) -> None:
        routes = [(p * 7 + i * 3) % EXPERTS for p in range(POSITIONS) for i in range(LAYERS * 2)]
        state = new_state(
            LAYERS,
            EXPERTS,
            TOP_K,
            slots,
            staging_slots=staging,
            decay=0.9,
            hot=hot,
            routes_ahead=[e + i // 2 % LAYERS * EXPERTS for i, e in enumerate(routes)],
        )
        self.offloader = offloader_of(state, eviction, prefetch, depth)
        self.slots, self.staging = slots, staging
        self.flying: list[Load] = []
        self.waiting: list[int] = []
        self.layer, self.step, self.depth = LAYERS, 0, 0
        self.position = 0

    @precondition(lambda self: self.layer == LAYERS and not self.waiting)
    @rule()
    def begin_window(self) -> None:
        self.depth = self.offloader.begin_window(self.position % POSITIONS, 5)
        self.layer, self.step = -1, 0

    @precondition(lambda self: self.layer == -1 and self.step < self.depth)
    @rule(routes=st.lists(st.tuples(IDS, IDS), min_size=LAYERS, max_size=LAYERS))
    def draft(self, routes: list[tuple[int, int]]) -> None:
        self.step += 1
        flat = [layer * EXPERTS + e for layer, pair in enumerate(routes) for e in sorted(set(pair))]
        self.offloader.drafted(DraftStep(self.step, flat, 1e-3))

    @precondition(lambda self: self.layer < LAYERS - 1 and not self.waiting)
    @rule(experts=st.sets(IDS, min_size=1), hints=st.sets(IDS))
    def demand(self, experts: set[int], hints: set[int]) -> None:
        self.layer += 1
        hinted = sorted(hints) if self.layer + 1 < LAYERS else []
        self.offloader.demand(self.layer, sorted(experts), hinted)
        self.waiting = [self.layer * EXPERTS + e for e in sorted(experts)]

    @rule(count=st.integers(1, 4))
    def start_loads(self, count: int) -> None:
        for _ in range(count):
            self.start_load()

    def start_load(self) -> None:
        s = self.offloader.state
        before, occupant = list(s.residency), list(s.occupant)
        load = self.offloader.next_load()
        if load is None:
            return
        assert before[load.expert] == ABSENT
        assert occupant[load.slot] == load.victim
        if load.victim >= 0:
            assert before[load.victim] == RESIDENT
            assert load.victim not in self.waiting
        if load.kind is LoadKind.DEMAND:
            assert load.expert in self.waiting
        else:
            assert load.expert // EXPERTS > self.layer
            assert load.slot < sum(self.slots), "a prefetch took a staging slot"
            assert load.victim < 0 or not s.hot[load.victim]
        self.flying.append(load)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def finish_load(self, data: st.DataObject) -> None:
        load = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        self.offloader.copied(Copied(load, 1e-3))

    @precondition(lambda self: any(map(self.offloader.is_resident, self.waiting)))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ready = [index for index in self.waiting if self.offloader.is_resident(index)]
        index = data.draw(st.sampled_from(ready))
        self.waiting.remove(index)
        self.offloader.release(index)

    @precondition(lambda self: self.waiting and not self.flying)
    @rule()
    def progress(self) -> None:
        """With nothing under way and nothing ready, the next load must be granted."""
        if not any(map(self.offloader.is_resident, self.waiting)):
            load = self.offloader.next_load()
            assert load is not None, "the schedule hangs"
            self.flying.append(load)

    @precondition(lambda self: self.layer == LAYERS - 1 and not self.waiting)
    @rule(accepted=st.integers(0, 5))
    def end_window(self, accepted: int) -> None:
        kept = min(accepted, self.depth)
        self.position += kept + 1
        self.offloader.end_window(WindowOutcome(self.depth, kept, 0.1, 0.2, 3, 1))
        self.layer = LAYERS

    @invariant()
    def slots_and_experts_agree(self) -> None:
        s = self.offloader.state
        for slot, index in enumerate(s.occupant):
            assert index < 0 or (s.slot_of[index] == slot and s.residency[index] != ABSENT)
        for index in range(ALL):
            assert (s.residency[index] == ABSENT) == (s.slot_of[index] < 0)
            assert s.slot_of[index] < 0 or s.occupant[s.slot_of[index]] == index

    @invariant()
    def experts_stay_in_their_group(self) -> None:
        s = self.offloader.state
        ends = [0]
        for count in (*self.slots, self.staging):
            ends.append(ends[-1] + count)
        for group, (begin, end) in enumerate(pairwise(ends)):
            inside = [index for index in s.occupant[begin:end] if index >= 0]
            assert s.free[group] == end - begin - len(inside)
            if len(self.slots) > 1 and group < LAYERS:
                assert all(index // EXPERTS == group for index in inside)

    @invariant()
    def loading_is_what_flies(self) -> None:
        s = self.offloader.state
        loading = Counter(index for index in range(ALL) if s.residency[index] == LOADING)
        assert loading == Counter(load.expert for load in self.flying)

    @invariant()
    def held_is_what_waits(self) -> None:
        held = {index: holds for index, holds in enumerate(self.offloader.state.holds) if holds}
        assert held == dict.fromkeys(self.waiting, 1)
        staged = self.offloader.state.occupant[sum(self.slots) :]
        assert all(index < 0 or index in self.waiting for index in staged)

    @invariant()
    def idle_without_a_window(self) -> None:
        if self.offloader.state.counters[WINDOW] == 0:
            assert not self.flying


Driver.TestCase.settings = settings(max_examples=200, stateful_step_count=80, deadline=None)
TestResidency = Driver.TestCase
