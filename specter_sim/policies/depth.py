"""Depth rules: how many tokens to draft before the next verify pass.

A rule is two functions over its own memory ``m``: ``choose`` is asked at the start of a window,
``ended`` is told how the window went. ``limit`` is what the rest of the text allows.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

Memory = MutableSequence[float]


def choose_fixed(m: Memory, limit: int) -> int:
    """Always ``m[0]``, as far as the text allows; 0 never speculates."""
    return min(int(m[0]), limit)


def ended_nothing(
    m: Memory,
    depth: int,
    accepted: int,
    draft_s: float,
    verify_s: float,
    demands: int,
    loads: int,
) -> None:
    """Rules that do not learn."""


@dataclass(frozen=True)
class DepthRule:
    """The two moments of a depth rule."""

    choose: Callable[[Memory, int], int] = choose_fixed
    ended: Callable[[Memory, int, int, float, float, int, int], None] = ended_nothing


FIXED = DepthRule()
