"""An oracle prefetch with knobs: how good must a prediction be, and how early?

It reads the target's own routes and spoils them on purpose: ``recall`` of what will be needed is
announced, padded with wrong experts until ``precision`` is met. ``lead`` layers ahead of the
verified layer it speaks; 0 means all layers at once, when the window begins.
"""

from __future__ import annotations

from specter_sim.policies.plan import add_to_plan
from specter_sim.policies.prefetch import Memory, PrefetchRule
from specter_sim.policies.state import DEPTH, LAYER, POSITION, SEED, State, scramble

RECALL, PRECISION, LEAD = range(3)
_UNIT = float(1 << 31)


def began_oracle(s: State, m: Memory) -> None:
    """Announce every layer, or the first ``lead`` layers."""
    ahead = s.layers if m[LEAD] == 0 else min(s.layers, int(m[LEAD]))
    for layer in range(ahead):
        announce(s, m, layer)


def routed_oracle(s: State, m: Memory) -> None:
    """Announce the layer ``lead`` ahead of the one being verified."""
    layer = s.counters[LAYER] + int(m[LEAD])
    if m[LEAD] > 0 and layer < s.layers:
        announce(s, m, layer)


def announce(s: State, m: Memory, layer: int) -> None:
    """Plan what the window's tokens will demand in one layer, spoiled by the knobs."""
    begin, row = s.counters[POSITION], s.layers * s.top_k
    seed, false_share = int(s.knobs[SEED]), 1.0 / m[PRECISION] - 1.0
    for position in range(begin, begin + s.counters[DEPTH] + 1):
        for rank in range(s.top_k):
            place = position * row + layer * s.top_k + rank
            if place >= s.ahead:
                return
            index = s.routes_ahead[place]
            if scramble(seed, begin, index) < m[RECALL] * _UNIT:
                add_to_plan(s, index)
                whole = int(false_share)
                extra = scramble(seed + 1, begin, index) < (false_share - whole) * _UNIT
                for wrong in range(whole + (1 if extra else 0)):
                    other = scramble(seed + 2 + wrong, begin, index) % s.experts
                    add_to_plan(s, layer * s.experts + other)


ORACLE = PrefetchRule(began=began_oracle, routed=routed_oracle)
