"""The paper's chunked planner: arXiv 2511.14102 as its published artifact behaves.

Three phases: ``COLD`` waits for the first fifth of the draft, ``OVERLAP`` plans again whenever
the copies of the last plan should be done, ``CLEANUP`` ignores every later route. Each plan is
the most predicted experts of a layer, as many as it has slots. When copies take longer than the
rest of the draft, there is exactly one plan a window.
"""

from __future__ import annotations

import math

from specter_sim.policies.plan import (
    keep_queued,
    plan_top_of_layer,
    slots_of_layer,
    touch,
)
from specter_sim.policies.prefetch import Memory, PrefetchRule
from specter_sim.policies.state import DEPTH, PLAN_TAIL, PREFETCH, State

PHASE, BANDWIDTH, DRAFT_S, BOUNDARY, LOAD_BYTES, NUM_FIELDS = range(6)
COLD, OVERLAP, CLEANUP = 0.0, 1.0, 2.0

FIRST_SHARE = 0.2
BANDWIDTH_PRIOR = 12e9  # bytes/s
DRAFT_PRIOR_S = 1e-3
KEPT = 0.75  # of an estimate at each new sample


def new_memory(load_bytes: float) -> list[float]:
    """The planner's memory at the start of a request: both estimates are priors."""
    return [COLD, BANDWIDTH_PRIOR, DRAFT_PRIOR_S, 1.0, load_bytes]


def began_paper(s: State, m: Memory) -> None:
    """Wait for the first fifth of the draft."""
    m[PHASE] = COLD
    m[BOUNDARY] = max(1.0, float(int(FIRST_SHARE * s.counters[DEPTH])))


def drafted_paper(s: State, m: Memory, step: int, seconds: float) -> None:
    """Plan at a boundary, then set the next one to when those copies should be done."""
    depth = s.counters[DEPTH]
    m[DRAFT_S] = KEPT * m[DRAFT_S] + (1 - KEPT) * seconds
    if m[PHASE] == CLEANUP or step < m[BOUNDARY]:
        return
    keep_queued(s)
    queued = s.counters[PLAN_TAIL]
    full = plan_and_touch(s)
    copy_s = (s.counters[PLAN_TAIL] - queued) * m[LOAD_BYTES] / m[BANDWIDTH]
    boundary = min(depth, step + max(1, math.ceil(copy_s / m[DRAFT_S])))
    m[BOUNDARY] = boundary
    m[PHASE] = CLEANUP if full or boundary == depth or step >= depth else OVERLAP


def plan_and_touch(s: State) -> bool:
    """Top-M of every layer, all of it made most recently used; whether every layer is full.

    Copies of an earlier plan were submitted with it and stay in the queue.
    """
    full = True
    for layer in range(s.layers):
        slots = slots_of_layer(s, layer)
        base, members = layer * s.experts, 0
        for index in range(base, base + s.experts):
            members += s.planned[index]
        plan_top_of_layer(s, layer, slots - members)
        members = 0
        for index in range(base, base + s.experts):
            if s.planned[index]:
                touch(s, index)
                members += 1
        full = full and members == slots
    return full


def copied_paper(s: State, m: Memory, kind: int, seconds: float) -> None:
    """Smooth the bandwidth with a prefetch just finished; demand copies are not timed."""
    if kind == PREFETCH and seconds > 0:
        m[BANDWIDTH] = KEPT * m[BANDWIDTH] + (1 - KEPT) * (m[LOAD_BYTES] / seconds)


PAPER = PrefetchRule(began=began_paper, drafted=drafted_paper, copied=copied_paper, joins=True)
