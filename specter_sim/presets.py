"""Complete systems by name: each a documented set of overrides over the default configuration.

A preset fixes policies, the form of experts and what the draft costs; slots, budget, machine,
model and trace stay the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One system: a summary, its source, and dotted configuration keys."""

    name: str
    summary: str
    overrides: Mapping[str, Any]
    source: str = ""


_PLAIN = {"experts.form": "plain"}
_PRESETS = (
    Preset(
        "layer-streaming",
        "whole layers stream through the memory, the first ones stay",
        {
            **_PLAIN,
            "policy.prefetch": "stream",
            "policy.eviction": "hot-lru",
            "policy.depth": "never",
            "memory.layout": "global",
        },
        "DeepSpeed/accelerate-style layer offload",
    ),
    Preset(
        "on-demand-lru",
        "a per-layer LRU of experts, loads on demand",
        {
            **_PLAIN,
            "policy.eviction": "lru",
            "policy.prefetch": "none",
            "policy.depth": "never",
        },
        "Mixtral-Offloading, arXiv 2312.17238, as arXiv 2511.14102 compares with it",
    ),
    Preset(
        "coded-lru",
        "the same LRU over losslessly coded experts (0.72 of the bytes in slot and load)",
        {
            "experts.form": "coded",
            "policy.eviction": "lru",
            "policy.prefetch": "none",
            "policy.depth": "never",
        },
    ),
    Preset(
        "next-layer-gate",
        "LRU, and prefetch of what the next layer's router picks one layer early",
        {
            **_PLAIN,
            "policy.eviction": "lru",
            "policy.prefetch": "gate",
            "policy.depth": "never",
        },
        "Mixtral-Offloading, arXiv 2312.17238",
    ),
    Preset(
        "specmoeoff-like",
        "depth 3, plans after the first two draft tokens, a draft that shares nothing",
        {
            **_PLAIN,
            "experts.draft_bits": 4,
            "experts.shared_draft": False,
            "policy.eviction": "lru",
            "policy.prefetch": "draft-first",
            "policy.depth": "fixed",
            "policy.depth_params.depth": 3,
        },
        "the speculative baseline of arXiv 2511.14102",
    ),
    Preset(
        "paper-artifact",
        "the paper's published artifact, flaws included",
        {
            **_PLAIN,
            "experts.draft_bits": 4,
            "experts.group_size": 128,
            "experts.grouped": False,
            "experts.captured_draft": False,
            "policy.eviction": "lru",
            "policy.prefetch": "paper",
            "policy.depth": "fixed",
            "policy.depth_params.depth": 16,
            "memory.initial": "highest",
        },
        "arXiv 2511.14102",
    ),
    Preset(
        "specter",
        "coded experts on a 3-bit base, continuous prefetch, predicted next use, governed depth",
        {
            "experts.form": "coded-base",
            "experts.draft_bits": 3,
            "policy.eviction": "predicted",
            "policy.prefetch": "continuous",
            "policy.depth": "governor",
        },
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
