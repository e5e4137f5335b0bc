"""What passes of this model take on this machine, measured in a moment before the first request.

A governor starts from these numbers and corrects them by what windows really take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from specter_runtime.experts import running
from specter_runtime.kv_cache import KvCache
from specter_runtime.live_model import Network
from specter_runtime.passes import DraftPass
from specter_runtime.weight_table import Source, answering
from specter_sim.setup.rules import Expectation

UNION_GROWTH = 0.55
"""T neighbouring tokens need about K * T^0.55 experts of a layer: tiny-moe's held-out routes, to
within 15 % for 2 to 17 tokens."""

_WIDE = 9
_REPEATS = 3


def measured_expectation(
    network: Network, draft: Sequence[dict[str, Source]], top_k: int, load_s: float
) -> Callable[[int], Expectation]:
    """Times two widths of a forward, computed by the draft, and draws a line through them."""
    one_s = _forward_s(network, draft, 1)
    each_s = max(0.0, (_forward_s(network, draft, _WIDE) - one_s) / (_WIDE - 1))
    layers = len(network.layers)
    experts = max(layer.num_experts for layer in network.layers)

    def expect(most: int) -> Expectation:
        depths = range(most + 1)
        return Expectation(
            [depth * one_s for depth in depths],
            [one_s + depth * each_s for depth in depths],
            [layers * min(experts, top_k * (depth + 1) ** UNION_GROWTH) for depth in depths],
            load_s,
        )

    return expect


def _forward_s(network: Network, draft: Sequence[dict[str, Source]], tokens: int) -> float:
    """Median seconds of a forward over `tokens` tokens behind a short text."""
    cache = KvCache(network.model)
    experts = max(layer.num_experts for layer in network.layers)
    passed = DraftPass(network.layers, experts, lambda: None)
    seconds = []
    with running(passed), answering(network.tables, draft):
        for _ in range(_REPEATS + 1):
            began_s = time.perf_counter()
            cache.forward(network.model, torch.zeros(tokens, dtype=torch.long))
            seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])  # the first one warms up
