"""Choosing experts by score, the one rule of every synthetic router."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

MEMORIES = np.array([0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.995, 1.0])
"""Correlation of one component of a score from a position to the next; 1 lasts a sequence."""


def best_experts(scores: NDArray[Any], top_k: int) -> NDArray[np.int64]:
    """Return the indices of the `top_k` largest scores along the last axis, largest first."""
    size = scores.shape[-1]
    best = np.argpartition(scores, size - top_k, axis=-1)[..., size - top_k :]
    order = np.argsort(-np.take_along_axis(scores, best, axis=-1), axis=-1)
    ranked: NDArray[np.int64] = np.take_along_axis(best, order, axis=-1)
    return ranked
