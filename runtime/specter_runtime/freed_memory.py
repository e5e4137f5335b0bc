"""Giving freed memory back to the system, which the C library may otherwise keep for later."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return what is free in the C library's heap to the system; without glibc, do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
