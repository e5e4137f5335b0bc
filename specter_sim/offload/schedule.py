"""The schedule: every transition of an offloader as a function over the flat state.

Who drives them does not matter here: the SimPy world, the runtime and a compiled engine call the
same functions in the same order, each followed by the prefetch rule's function of that moment,
and get the same loads. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

from specter_sim.offload.residency import access, arrived, reserve, vacate
from specter_sim.policies.eviction import find_slot, free_slot
from specter_sim.policies.plan import clear_plan
from specter_sim.policies.state import (
    ABSENT,
    DEMAND,
    DEMAND_HEAD,
    DEMAND_LOADS,
    DEMAND_TAIL,
    DEPTH,
    HINTED,
    HITS,
    LATE,
    LAYER,
    LOADING,
    MISSES,
    NEXT_START,
    PENDING,
    PLAN_HEAD,
    PLAN_TAIL,
    POSITION,
    PREFETCH,
    PREFETCH_LOADS,
    PREFETCHING,
    RESIDENT,
    TOUCHED,
    USEFUL,
    WASTED,
    WINDOW,
    State,
    VictimKey,
    group_of,
)

NO_LOAD = (-1, -1, DEMAND, -1)


def begin_window(s: State, position: int, depth: int, next_start: int) -> None:
    """A window starts at ``position`` and will draft ``depth`` tokens.

    ``next_start`` is where the window after it begins, as far as anybody knows: only rules that
    are given the future look at it.
    """
    c = s.counters
    c[WINDOW] += 1
    c[POSITION], c[DEPTH], c[LAYER], c[HINTED] = position, depth, -1, 0
    c[NEXT_START] = next_start
    clear_plan(s)


def window_end(s: State, position: int, depth: int) -> int:
    """Where a window of this depth hands over to the next, by the acceptances known ahead."""
    accepted = s.accepted_run[position] if position < s.known else depth
    return position + min(depth, accepted) + 1


def drafted(s: State, routes: Sequence[int], begin: int, end: int) -> None:
    """A draft forward ended and routed to the experts ``routes[begin:end]`` (flat indices)."""
    c = s.counters
    for place in range(begin, end):
        index = routes[place]
        if s.predicted[index] == 0:
            s.touched[c[TOUCHED]] = index
            c[TOUCHED] += 1
        s.predicted[index] += 1


def demand(
    s: State, layer: int, experts: Sequence[int], count: int, hints: Sequence[int], hinted: int
) -> None:
    """Hold the experts a layer needs and queue loads for the absent ones.

    Args:
        experts: ids in the layer, each once, in the order they are used; ``count`` of them.
        hints: ids a gate expects in the next layer, ``hinted`` of them; 0 when nobody asked it.
    """
    c = s.counters
    c[LAYER] = layer
    c[DEMAND_HEAD] = c[DEMAND_TAIL] = 0
    for place in range(count):
        demand_one(s, layer * s.experts + experts[place])
    c[HINTED] = hinted
    for place in range(hinted):
        s.hints[place] = hints[place]


def put_hits_first(s: State, layer: int, experts: MutableSequence[int], count: int) -> None:
    """Reorder a layer's ``count`` experts in place: resident ones first, else as they were."""
    placed, base = 0, layer * s.experts
    for place in range(count):
        expert = experts[place]
        if s.residency[base + expert] == RESIDENT:
            for back in range(place, placed, -1):
                experts[back] = experts[back - 1]
            experts[placed] = expert
            placed += 1


def demand_one(s: State, index: int) -> None:
    """Count, mark as used, hold, and queue when absent."""
    c = s.counters
    state = s.residency[index]
    if state == RESIDENT:
        c[HITS] += 1
        if s.fresh[index]:
            c[USEFUL] += 1
    elif state == LOADING:
        c[PENDING] += 1
        if s.fresh[index]:
            c[LATE] += 1
    else:
        c[MISSES] += 1
        s.demand_queue[c[DEMAND_TAIL]] = index
        c[DEMAND_TAIL] += 1
    s.fresh[index] = 0
    access(s, index)
    s.holds[index] += 1


def release(s: State, index: int) -> None:
    """The window is done with an expert; a staged one leaves at once."""
    s.holds[index] -= 1
    slot = s.slot_of[index]
    if slot >= s.slot_begin[s.groups] and s.holds[index] == 0:
        vacate(s, slot)
        s.free[s.groups] += 1


def wants_nothing(s: State) -> bool:
    """Whether no load is queued, so that ``next_load`` has none to give."""
    c = s.counters
    return c[DEMAND_HEAD] >= c[DEMAND_TAIL] and c[PLAN_HEAD] >= c[PLAN_TAIL]


def next_load(s: State, key: VictimKey) -> tuple[int, int, int, int]:
    """What the link copies next, as (index, slot, kind, victim); demand before prefetch.

    Returns ``NO_LOAD`` when nothing is wanted or nothing may go.
    """
    load = next_demand(s, key)
    return load if load[0] >= 0 else next_prefetch(s, key)


def next_demand(s: State, key: VictimKey) -> tuple[int, int, int, int]:
    """The first demanded expert that is still absent, if some slot may be had."""
    c = s.counters
    while c[DEMAND_HEAD] < c[DEMAND_TAIL]:
        index = s.demand_queue[c[DEMAND_HEAD]]
        if s.residency[index] == ABSENT:
            group, slot = demand_slot(s, index, key)
            if slot < 0:
                return NO_LOAD
            c[DEMAND_HEAD] += 1
            c[DEMAND_LOADS] += 1
            return (index, slot, DEMAND, reserve(s, group, slot, index))
        c[DEMAND_HEAD] += 1
    return NO_LOAD


def demand_slot(s: State, index: int, key: VictimKey) -> tuple[int, int]:
    """Group and slot for a demand load: with a staging pool, residents are left alone."""
    group = group_of(s, index)
    staging = s.slot_begin[s.groups + 1] > s.slot_begin[s.groups]
    if staging and s.free[group] == 0:
        return s.groups, free_slot(s, s.groups) if s.free[s.groups] > 0 else -1
    return group, find_slot(s, index, DEMAND, key)


def next_prefetch(s: State, key: VictimKey) -> tuple[int, int, int, int]:
    """The first planned expert of a layer still to come that may have a slot.

    A layer whose slots are all held, loading or planned drops out of the plan; under a global
    budget there is one pool, so nothing behind the first refusal could do better.
    """
    c = s.counters
    reached = (c[LAYER] + 1) * s.experts
    while c[PLAN_HEAD] < c[PLAN_TAIL]:
        index = s.plan_queue[c[PLAN_HEAD]]
        if index >= reached and s.residency[index] == ABSENT:
            slot = find_slot(s, index, PREFETCH, key)
            if slot >= 0:
                c[PLAN_HEAD] += 1
                return issue_prefetch(s, slot, index)
            if s.groups < s.layers:
                return NO_LOAD
        c[PLAN_HEAD] += 1
    return NO_LOAD


def issue_prefetch(s: State, slot: int, index: int) -> tuple[int, int, int, int]:
    """Start a prefetch and mark it, to tell later whether it was of use."""
    c = s.counters
    victim = reserve(s, group_of(s, index), slot, index)
    s.fresh[index] = 1
    c[PREFETCH_LOADS] += 1
    c[PREFETCHING] += 1
    return (index, slot, PREFETCH, victim)


def copied(s: State, index: int, kind: int) -> None:
    """A load finished."""
    arrived(s, index)
    if kind == PREFETCH:
        s.counters[PREFETCHING] -= 1


def end_window(s: State) -> None:
    """The window is over: unused prefetches were wasted, predictions are void."""
    c = s.counters
    for place in range(c[TOUCHED]):
        s.predicted[s.touched[place]] = 0
    wasted = c[PREFETCH_LOADS] - c[USEFUL] - c[LATE]
    if wasted > c[WASTED]:  # else no expert is still fresh
        for slot in range(s.slot_begin[s.groups + 1]):
            if s.occupant[slot] >= 0:
                s.fresh[s.occupant[slot]] = 0
    c[WASTED] = wasted
    c[TOUCHED] = 0
    clear_plan(s)
    c[LAYER] = s.layers
