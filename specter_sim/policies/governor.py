"""A depth governor: draft as deep as the expected tokens per second grow.

The objective is the paper's (arXiv 2511.14102v1, Amortization Roofline) with the correction or
bonus token counted: expected committed tokens ``1 + sum_i prod_{j<=i} a_j`` over a predicted
window time. The prediction adds draft, verify compute and the loads that the draft cannot hide;
it starts from the cost model and is corrected, per depth, by what windows really took.
A depth that loses is left, and tried again only now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from specter_sim.policies.depth import DepthRule, Memory

(
    WINDOWS,
    MAX_DEPTH,
    PROBE_EVERY,
    LOAD_S,  # seconds the link needs for one load
    ACCEPTANCE,  # smoothed probability that a proposal is accepted
    MISS_RATE,  # smoothed loads per demand
    RATIO,  # smoothed measured / predicted time, over all depths
    LAST_PROBE,
    HEADER,
) = range(9)

KEPT = 0.9  # of a smoothed value at each new window
ACCEPTANCE_PRIOR, MISS_PRIOR = 0.8, 0.5


def new_memory(
    draft_s: Sequence[float],
    verify_s: Sequence[float],
    demands: Sequence[float],
    load_s: float,
    probe_every: int = 32,
) -> list[float]:
    """The governor's memory at the start of a request.

    Args:
        draft_s: predicted seconds of a draft by depth 0..max.
        verify_s: predicted compute seconds of a verify pass by depth.
        demands: expected experts demanded in a window by depth, all layers.
        load_s: seconds of one load on the link.
        probe_every: windows between two tries of a neighbouring depth.
    """
    depths = len(draft_s)
    head = [0.0, depths - 1.0, float(probe_every), load_s]
    head += [ACCEPTANCE_PRIOR, MISS_PRIOR, 1.0, 0.0]
    return [*head, *draft_s, *verify_s, *demands, *([0.0] * depths)]


def choose_governed(m: Memory, limit: int) -> int:
    """The depth with the most expected tokens a second, or a probe of a neighbour."""
    most = min(int(m[MAX_DEPTH]), limit)
    best, best_rate = 0, 0.0
    for depth in range(most + 1):
        rate = expected_tokens(m, depth) / corrected_s(m, depth)
        if rate > best_rate:
            best, best_rate = depth, rate
    windows = int(m[WINDOWS])
    if windows > 0 and windows % int(m[PROBE_EVERY]) == 0:
        up = m[LAST_PROBE] == 0.0
        m[LAST_PROBE] = 1.0 if up else 0.0
        probe = best + 1 if up else best - 1
        return max(0, min(probe, most))
    return best


def expected_tokens(m: Memory, depth: int) -> float:
    """Tokens a window of this depth commits on average: accepted ones and one of the target's."""
    tokens, chance = 1.0, 1.0
    for _ in range(depth):
        chance *= m[ACCEPTANCE]
        tokens += chance
    return tokens


def predicted_s(m: Memory, depth: int) -> float:
    """Seconds of a window by the cost model: loads hide behind the draft, then behind compute."""
    depths = int(m[MAX_DEPTH]) + 1
    draft_s, verify_s = m[HEADER + depth], m[HEADER + depths + depth]
    loads_s = m[MISS_RATE] * m[HEADER + 2 * depths + depth] * m[LOAD_S]
    return draft_s + max(verify_s, loads_s - draft_s)


def corrected_s(m: Memory, depth: int) -> float:
    """The prediction times the ratio seen at this depth, or overall where it is untried."""
    ratio = m[HEADER + 3 * (int(m[MAX_DEPTH]) + 1) + depth]
    return predicted_s(m, depth) * (ratio if ratio > 0.0 else m[RATIO])


def ended_governed(
    m: Memory,
    depth: int,
    accepted: int,
    draft_s: float,
    verify_s: float,
    demands: int,
    loads: int,
) -> None:
    """Learn from a window: acceptance, loads per demand, and how far the prediction was off."""
    m[WINDOWS] += 1
    trials = accepted + (1 if accepted < depth else 0)
    for trial in range(trials):
        hit = 1.0 if trial < accepted else 0.0
        m[ACCEPTANCE] = 0.95 * m[ACCEPTANCE] + 0.05 * hit
    if demands > 0:
        m[MISS_RATE] = KEPT * m[MISS_RATE] + (1 - KEPT) * loads / demands
    ratio = (draft_s + verify_s) / predicted_s(m, depth)
    m[RATIO] = KEPT * m[RATIO] + (1 - KEPT) * ratio
    place = HEADER + 3 * (int(m[MAX_DEPTH]) + 1) + depth
    m[place] = ratio if m[place] == 0.0 else KEPT * m[place] + (1 - KEPT) * ratio


GOVERNED = DepthRule(choose=choose_governed, ended=ended_governed)
