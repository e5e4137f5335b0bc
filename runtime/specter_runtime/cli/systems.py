"""The systems that are run when nobody names one: the best that are known with plain experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN = "plain"
DRAFTED = "plain-drafted"

_SHARED: Mapping[str, Any] = {
    "experts.form": "plain",
    "experts.draft_bits": 4,
    "experts.group_size": 64,
    "memory.layout": "global",
    "memory.initial": "cold",
    "policy.demand": "resident",
}

DEFAULTS: dict[str, dict[str, Any]] = {
    # Without a draft its memory is slots. On tiny-moe, links of 100 and 400 MB/s and 20 to 32 MiB,
    # the simulator finds no faster system of plain experts among those it knows (2026-11-30).
    PLAIN: {
        **_SHARED,
        "policy.eviction": "lfu",
        "policy.prefetch": "gate",
        "policy.depth": "never",
    },
    # The fastest of those that draft, in the same study: what a --depth is about.
    DRAFTED: {
        **_SHARED,
        "policy.eviction": "predicted",
        "policy.prefetch": "continuous",
        "policy.depth": "governor",
    },
}
"""Dotted keys by name, as those of a preset."""
