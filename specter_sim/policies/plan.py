"""The prefetch plan: an ordered queue of experts to load, and the set it protects."""

from __future__ import annotations

from specter_sim.policies.state import (
    ABSENT,
    MEMBERS,
    PLAN_HEAD,
    PLAN_TAIL,
    TICK,
    State,
)


def clear_plan(s: State) -> None:
    """Forget the plan; loads that have not started cost nothing to drop."""
    c = s.counters
    for place in range(c[MEMBERS]):
        s.planned[s.members[place]] = 0
    c[MEMBERS] = c[PLAN_HEAD] = c[PLAN_TAIL] = 0


def add_to_plan(s: State, index: int) -> None:
    """Protect an expert and, when it is absent, queue its load."""
    c = s.counters
    if s.planned[index]:
        return
    s.planned[index] = 1
    s.members[c[MEMBERS]] = index
    c[MEMBERS] += 1
    if s.residency[index] == ABSENT:
        s.plan_queue[c[PLAN_TAIL]] = index
        c[PLAN_TAIL] += 1


def keep_queued(s: State) -> None:
    """Forget the plan except the loads that are still queued."""
    c = s.counters
    for place in range(c[MEMBERS]):
        s.planned[s.members[place]] = 0
    kept = 0
    for place in range(c[PLAN_HEAD], c[PLAN_TAIL]):
        index = s.plan_queue[place]
        if s.residency[index] == ABSENT:
            s.planned[index] = 1
            s.members[kept] = s.plan_queue[kept] = index
            kept += 1
    c[PLAN_HEAD] = 0
    c[MEMBERS] = c[PLAN_TAIL] = kept


def touch(s: State, index: int) -> None:
    """Make an expert the most recently used without using it."""
    s.counters[TICK] += 1
    s.last_access[index] = s.counters[TICK]


def plan_top_predicted(s: State, limit: int) -> int:
    """Plan the ``limit`` most predicted experts of every layer; returns loads queued.

    Ties go to the lower id. A layer contributes only experts that were predicted at all.
    """
    queued = s.counters[PLAN_TAIL]
    for layer in range(s.layers):
        plan_top_of_layer(s, layer, limit)
    return s.counters[PLAN_TAIL] - queued


def plan_top_of_layer(s: State, layer: int, limit: int) -> None:
    """Plan the ``limit`` most predicted experts of one layer, most predicted first."""
    base = layer * s.experts
    for _ in range(limit):
        best = -1
        for index in range(base, base + s.experts):
            if s.planned[index] or s.predicted[index] == 0:
                continue
            if best < 0 or s.predicted[index] > s.predicted[best]:
                best = index
        if best < 0:
            return
        add_to_plan(s, best)


def slots_of_layer(s: State, layer: int) -> int:
    """Slots a layer may fill: its own, or its even share of a global budget (at least one)."""
    if s.groups > 1 or s.layers == 1:
        return s.slot_begin[layer + 1] - s.slot_begin[layer]
    return max(1, s.slot_begin[1] // s.layers)
