"""Prefetch rules: what to load before it is demanded.

A rule is four functions over the flat state and its own memory ``m``; each is told of a moment
and may change the plan. ``began`` hears a window begin, ``drafted`` a draft step end, ``routed``
a layer's experts become known, ``copied`` a load finish. ``m`` is a list of floats with a fresh
copy per request, so a rule needs no other state.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

from specter_sim.policies.eviction import lfu
from specter_sim.policies.plan import (
    add_to_plan,
    clear_plan,
    plan_top_predicted,
    slots_of_layer,
)
from specter_sim.policies.state import DEPTH, HINTED, LAYER, State

Memory = MutableSequence[float]


def began_nothing(s: State, m: Memory) -> None:
    """Most rules do nothing when a window begins."""


def drafted_nothing(s: State, m: Memory, step: int, seconds: float) -> None:
    """Rules that do not look at the draft."""


def routed_nothing(s: State, m: Memory) -> None:
    """Rules that do not look at the target's routes."""


def copied_nothing(s: State, m: Memory, kind: int, seconds: float) -> None:
    """Rules that do not measure the link."""


@dataclass(frozen=True)
class PrefetchRule:
    """The four moments of a prefetch rule.

    Attributes:
        joins: verification waits until every prefetch of the window has arrived.
    """

    began: Callable[[State, Memory], None] = began_nothing
    drafted: Callable[[State, Memory, int, float], None] = drafted_nothing
    routed: Callable[[State, Memory], None] = routed_nothing
    copied: Callable[[State, Memory, int, float], None] = copied_nothing
    joins: bool = False


# popularity: m = [experts a layer]


def began_popular(s: State, m: Memory) -> None:
    """Plan the first layer's most used experts."""
    plan_popular(s, 0, int(m[0]))


def routed_popular(s: State, m: Memory) -> None:
    """Plan the next layer's most used experts."""
    layer = s.counters[LAYER] + 1
    if layer < s.layers:
        plan_popular(s, layer, int(m[0]))


def plan_popular(s: State, layer: int, limit: int) -> None:
    """Plan the ``limit`` experts of a layer with the most decayed uses."""
    base = layer * s.experts
    for _ in range(min(limit, slots_of_layer(s, layer))):
        best, most = -1, 0.0
        for index in range(base, base + s.experts):
            if s.planned[index]:
                continue
            value = lfu(s, index)
            if value > most:
                best, most = index, value
        if best < 0:
            return
        add_to_plan(s, best)


# next-layer gate


def routed_gate(s: State, m: Memory) -> None:
    """Plan what the next layer's router picks when applied one layer early."""
    base = (s.counters[LAYER] + 1) * s.experts
    for hint in range(s.counters[HINTED]):
        add_to_plan(s, base + s.hints[hint])


# draft once: m = [share of the draft after which to plan]


def drafted_once(s: State, m: Memory, step: int, seconds: float) -> None:
    """One plan a window, after a fixed share of the draft."""
    if step == max(1, int(m[0] * s.counters[DEPTH])):
        clear_plan(s)
        plan_top_predicted(s, s.experts)


# first steps: m = [draft steps after which to plan]


def drafted_first_steps(s: State, m: Memory, step: int, seconds: float) -> None:
    """Replan after each of the first draft steps (SpecMoEOff plans after tokens 0 and 1)."""
    if step <= int(m[0]):
        clear_plan(s)
        plan_top_predicted(s, s.experts)


# continuous


def drafted_continuous(s: State, m: Memory, step: int, seconds: float) -> None:
    """Replan after every draft step, earliest deadline first.

    A layer's deadline is the moment verification reaches it, so the queue runs through the
    layers in order; every expert is awaited by itself, and whatever has not started when its
    layer is reached becomes a demand.
    """
    clear_plan(s)
    for index in range(s.layers * s.experts):
        if s.predicted[index] > 0:
            add_to_plan(s, index)


# layer streaming


def began_stream(s: State, m: Memory) -> None:
    """Plan every expert of every layer in order: whole layers stream through the slots."""
    for index in range(s.layers * s.experts):
        add_to_plan(s, index)


NONE = PrefetchRule()
POPULARITY = PrefetchRule(began=began_popular, routed=routed_popular)
GATE = PrefetchRule(routed=routed_gate)
ONCE = PrefetchRule(drafted=drafted_once)
FIRST_STEPS = PrefetchRule(drafted=drafted_first_steps)
CONTINUOUS = PrefetchRule(drafted=drafted_continuous)
STREAM = PrefetchRule(began=began_stream)
