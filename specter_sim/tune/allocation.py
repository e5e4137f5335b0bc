"""Which layer gets how many slots: one after another, to where the next one saves most loads."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from specter_sim.engine.curves import cache_curves
from specter_traces import Trace


def saved_loads(trace: Trace, warm: bool) -> NDArray[np.int64]:
    """Loads of a layer that one more slot saves, [L, E+1]: entry ``s`` is the slot after ``s``.

    From each layer's LRU hit curve, its tokens looked up one after another. Entries below top-k
    are zero: there the curve does not reach.
    """
    (curve,) = cache_curves(trace, policies=("lru",), warm=warm)
    saved = np.zeros((trace.num_layers, trace.num_experts + 1), dtype=np.int64)
    saved[:, curve.slots[:-1]] = np.diff(curve.hits, axis=1)
    return saved


def allocate(saved: NDArray[np.int64], total: int, least: int) -> tuple[int, ...] | None:
    """Slots of every layer, ``total`` together and at least ``least`` each, by marginal benefit.

    Ties go to the layer with fewer slots, then to the earlier one. None when ``least`` a layer are
    more than there are.
    """
    layers, most = len(saved), saved.shape[1] - 1
    if least * layers > total:
        return None
    slots = [least] * layers
    gains = [(-int(saved[layer, least]), least, layer) for layer in range(layers)]
    heapq.heapify(gains)
    for _ in range(min(total, layers * most) - least * layers):
        while slots[gains[0][2]] >= most:
            heapq.heappop(gains)
        _, count, layer = heapq.heappop(gains)
        slots[layer] = count + 1
        heapq.heappush(gains, (-int(saved[layer, count + 1]), count + 1, layer))
    return tuple(slots)
