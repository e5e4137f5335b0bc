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


# Every preset states all of these, so that none inherits a part of another system.
_PLAIN_DECODING: Mapping[str, Any] = {
    "experts.form": "plain",
    "experts.draft_bits": 4,
    "experts.group_size": 64,
    "experts.shared_draft": True,
    "experts.grouped": True,
    "experts.grouped_draft": True,
    "experts.captured_draft": True,
    "memory.layout": "per-layer",
    "memory.staging_slots": 0,
    "memory.initial": "cold",
    "policy.eviction": "lru",
    "policy.prefetch": "none",
    "policy.depth": "never",
    "policy.demand": "resident",
}


def _system(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {**_PLAIN_DECODING, **changes}


_PRESETS = (
    Preset(
        "layer-streaming",
        "whole layers stream through the memory, the first ones stay; every expert is demanded",
        _system(
            {
                "memory.layout": "global",
                "policy.eviction": "hot-lru",
                "policy.prefetch": "stream",
            }
        ),
        "layer offload as in DeepSpeed and accelerate",
    ),
    Preset(
        "on-demand-lru",
        "a per-layer LRU of experts, loads on demand",
        _system({}),
        "Mixtral-Offloading, arXiv 2312.17238, as arXiv 2511.14102 compares with it",
    ),
    Preset(
        "coded-lru",
        "the same LRU over losslessly coded experts (0.68 of the bytes in slot and load)",
        _system({"experts.form": "coded"}),
    ),
    Preset(
        "next-layer-gate",
        "LRU, and prefetch of what the next layer's router picks one layer early",
        _system({"policy.prefetch": "gate"}),
        "Mixtral-Offloading, arXiv 2312.17238",
    ),
    Preset(
        "specmoeoff-like",
        "depth 3, plans after the first two draft tokens, a draft that shares nothing",
        _system(
            {
                "experts.shared_draft": False,
                "policy.prefetch": "draft-first",
                "policy.depth": 3,
            }
        ),
        "the speculative baseline of arXiv 2511.14102",
    ),
    # Its flaws that are not modelled: a host synchronisation for every expert of some models, the
    # blocking read of a plan, attention's copy of the KV prefix in every draft step.
    Preset(
        "paper-artifact",
        "the paper's artifact with its flaws: one early plan, a join, 32 buffers never used",
        _system(
            {
                "experts.group_size": 128,
                "experts.grouped": False,
                "experts.captured_draft": False,
                "memory.staging_slots": 32,
                "memory.initial": "highest",
                "policy.prefetch": "paper",
                "policy.depth": 16,
            }
        ),
        "arXiv 2511.14102",
    ),
    Preset(
        "specter",
        "coded experts on a 3-bit base, one pool, continuous prefetch, governed depth",
        _system(
            {
                "experts.form": "coded-base",
                "experts.draft_bits": 3,
                "memory.layout": "global",
                "policy.eviction": "predicted",
                "policy.prefetch": "continuous",
                "policy.depth": "governor",
            }
        ),
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
