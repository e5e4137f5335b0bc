"""The compiled entry points. Importing this module compiles them, or loads them from the cache."""

from __future__ import annotations

from typing import Any

from specter_sim.engine import kernel
from specter_sim.engine.compile import register, use_cache_folder

use_cache_folder()

from numba import njit, void  # noqa: E402
from numba.core.types import float64, int64  # noqa: E402

from specter_sim.engine.block_type import block_at  # noqa: E402

register()

_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy"}


@njit(void(int64, int64, int64), **_OPTIONS)
def serve(address: int, number: int, decoding: int) -> None:
    """Prefill request ``number`` of the block at ``address`` (0), or decode it (1).

    One entry for both: each entry is compiled with everything it calls.
    """
    if decoding == 1:
        kernel.serve_text(block_at(address), number)
    else:
        kernel.serve_prompt(block_at(address), number)


@njit(int64(int64, int64, int64), **_OPTIONS)
def least_loads(address: int, first: int, last: int) -> int:
    """Loads that no schedule could have avoided in some windows of the last request served."""
    return kernel.least_loads(block_at(address), first, last)


@njit(float64(int64, int64, int64, int64), **_OPTIONS)
def least_compute(address: int, number: int, first: int, last: int) -> float:
    """GPU seconds that no schedule could have avoided in some windows of a request."""
    return kernel.least_compute(block_at(address), number, first, last)


@njit(void(int64), **_OPTIONS)
def drain(address: int) -> None:
    """Let the copies under way finish."""
    kernel.drain(block_at(address))
