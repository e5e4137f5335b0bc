"""A depth governor: draft as deep as the expected tokens per second grow.

The objective is the paper's (arXiv 2511.14102v1, Amortization Roofline) with the correction or
bonus token counted: expected committed tokens ``1 + sum_i prod_{j<=i} p_j`` over a predicted
window time, ``p_j`` the smoothed chance that proposal ``j`` is accepted when all before it were.
The prediction adds draft, verify compute and the loads that the draft cannot hide; it starts from
the cost model and is corrected, per depth, by what windows really took. The depth moves one step a
window, and now and then tries a neighbour, so a depth that loses is left and found again.
"""

from __future__ import annotations

from collections.abc import Sequence

from specter_sim.policies.depth import DepthRule, Memory

(
    WINDOWS,
    MAX_DEPTH,
    PROBE_EVERY,
    LOAD_S,  # seconds the link needs for one load
    ACCEPTANCE,  # smoothed chance that a proposal is accepted, over all places
    MISS_RATE,  # smoothed loads per demand
    RATIO,  # smoothed measured / predicted time, over all depths
    LAST_PROBE,
    SETTLED,  # the depth chosen last, probes aside; -1 at first
    HEADER,
) = range(10)

# Behind the header, one number a depth 0..max each: draft seconds, verify seconds, demands (given),
# measured / predicted time and the windows behind it, acceptance of proposal ``depth`` and its
# trials (learned).
DRAFT_S, VERIFY_S, DEMANDS, OWN_RATIO, OWN_WINDOWS, CHANCE, TRIALS, NUM_TABLES = range(8)

KEPT = 0.9  # of a smoothed value at each new window
KEPT_ACCEPTANCE = 0.95
PATIENCE = 1.0  # windows of a depth that weigh as much as what all depths have shown
PATIENCE_ACCEPTANCE = 8.0  # the same for the trials of one place
MOST_WEIGHT = 32.0
ACCEPTANCE_PRIOR, MISS_PRIOR = 0.8, 0.5


def new_memory(
    draft_s: Sequence[float],
    verify_s: Sequence[float],
    demands: Sequence[float],
    load_s: float,
    probe_every: int = 32,
) -> list[float]:
    """The governor's memory at the start of a run; what it learns it keeps between requests.

    Args:
        draft_s: predicted seconds of a draft by depth 0..max.
        verify_s: predicted compute seconds of a verify pass by depth.
        demands: expected experts demanded in a window by depth, all layers.
        load_s: seconds of one load on the link.
        probe_every: windows between two tries of a neighbouring depth.
    """
    depths = len(draft_s)
    head = [0.0, depths - 1.0, float(probe_every), load_s]
    head += [ACCEPTANCE_PRIOR, MISS_PRIOR, 1.0, 0.0, -1.0]
    return [*head, *draft_s, *verify_s, *demands, *([0.0] * (4 * depths))]


def entry(m: Memory, table: int, depth: int) -> int:
    """Where a table keeps the number of a depth."""
    return HEADER + table * (int(m[MAX_DEPTH]) + 1) + depth


def choose_governed(m: Memory, limit: int) -> int:
    """The depth with the most expected tokens a second next to the last one, or a probe."""
    most = min(int(m[MAX_DEPTH]), limit)
    low, high, settled = 0, most, int(m[SETTLED])
    if settled >= 0:
        low, high = min(most, max(0, settled - 1)), min(most, settled + 1)
    best, best_rate = low, 0.0
    for depth in range(low, high + 1):
        rate = expected_tokens(m, depth) / corrected_s(m, depth)
        if rate > best_rate:
            best, best_rate = depth, rate
    m[SETTLED] = best
    windows = int(m[WINDOWS])
    if windows > 0 and windows % int(m[PROBE_EVERY]) == 0:
        up = m[LAST_PROBE] == 0.0
        m[LAST_PROBE] = 1.0 if up else 0.0
        best = best + 1 if up else best - 1
    return max(0, min(best, most))


def expected_tokens(m: Memory, depth: int) -> float:
    """Tokens a window of this depth commits on average: accepted ones and one of the target's."""
    tokens, survival = 1.0, 1.0
    for place in range(1, depth + 1):
        own, trials = m[entry(m, CHANCE, place)], m[entry(m, TRIALS, place)]
        survival *= (trials * own + PATIENCE_ACCEPTANCE * m[ACCEPTANCE]) / (
            trials + PATIENCE_ACCEPTANCE
        )
        tokens += survival
    return tokens


def predicted_s(m: Memory, depth: int) -> float:
    """Seconds of a window by the cost model: loads hide behind the draft, then behind compute."""
    draft_s, verify_s = m[entry(m, DRAFT_S, depth)], m[entry(m, VERIFY_S, depth)]
    loads_s = m[MISS_RATE] * m[entry(m, DEMANDS, depth)] * m[LOAD_S]
    return draft_s + max(verify_s, loads_s - draft_s)


def corrected_s(m: Memory, depth: int) -> float:
    """The prediction times the ratio seen: at this depth, as far as it was tried, and overall."""
    own, windows = m[entry(m, OWN_RATIO, depth)], m[entry(m, OWN_WINDOWS, depth)]
    ratio = (windows * own + PATIENCE * m[RATIO]) / (windows + PATIENCE)
    return predicted_s(m, depth) * ratio


def learn(m: Memory, value: int, weight: int, seen: float) -> None:
    """Move a mean towards what was seen; after ``MOST_WEIGHT`` observations it forgets slowly."""
    share = 1.0 / (m[weight] + 1.0)
    m[value] = (1.0 - share) * m[value] + share * seen
    m[weight] = min(m[weight] + 1.0, MOST_WEIGHT)


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
    for place in range(1, min(depth, accepted + 1) + 1):
        hit = 1.0 if place <= accepted else 0.0
        m[ACCEPTANCE] = KEPT_ACCEPTANCE * m[ACCEPTANCE] + (1 - KEPT_ACCEPTANCE) * hit
        learn(m, entry(m, CHANCE, place), entry(m, TRIALS, place), hit)
    if demands > 0:
        m[MISS_RATE] = KEPT * m[MISS_RATE] + (1 - KEPT) * loads / demands
    ratio = (draft_s + verify_s) / predicted_s(m, depth)
    m[RATIO] = KEPT * m[RATIO] + (1 - KEPT) * ratio
    learn(m, entry(m, OWN_RATIO, depth), entry(m, OWN_WINDOWS, depth), ratio)


GOVERNED = DepthRule(choose=choose_governed, ended=ended_governed)
