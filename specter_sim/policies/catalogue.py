"""Every policy by name: what it does, its source, its parameters, and what it must be given."""

from __future__ import annotations

from dataclasses import dataclass, field

from specter_sim.policies import eviction
from specter_sim.policies.depth import FIXED, DepthRule
from specter_sim.policies.governor import GOVERNED
from specter_sim.policies.oracle_prefetch import ORACLE
from specter_sim.policies.paper_planner import PAPER
from specter_sim.policies.prefetch import (
    CONTINUOUS,
    FIRST_STEPS,
    GATE,
    NONE,
    ONCE,
    POPULARITY,
    STREAM,
    PrefetchRule,
)
from specter_sim.policies.state import VictimKey

Scalar = bool | int | float | str
PAPER_SOURCE = "arXiv 2511.14102"


@dataclass(frozen=True)
class Param:
    """One parameter of a policy: its default, what it means, and its allowed range."""

    default: Scalar
    doc: str
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class PolicyInfo:
    """A policy as its users know it.

    ``needs`` names what it must be given when built: ``future`` (the target's routes to come),
    ``paired`` (a draft), ``gate`` (next-layer-gate predictions), ``popularity``, ``costs``.
    """

    name: str
    summary: str
    source: str = ""
    params: dict[str, Param] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class EvictionInfo(PolicyInfo):
    """An eviction policy and its rule."""

    rule: VictimKey = eviction.lru


@dataclass(frozen=True)
class PrefetchInfo(PolicyInfo):
    """A prefetch policy and its rule."""

    rule: PrefetchRule = NONE


@dataclass(frozen=True)
class DepthInfo(PolicyInfo):
    """A depth policy and its rule."""

    rule: DepthRule = FIXED


_DECAY = Param(0.9, "what a use is worth one window later", 0.0, 1.0)

_EVICTION = (
    EvictionInfo("lru", "least recently used goes", rule=eviction.lru),
    EvictionInfo(
        "lfu",
        "least frequently used goes; uses fade with every window",
        params={
            "decay": _DECAY,
            "forget": Param(False, "whether an evicted expert loses its uses"),
        },
        rule=eviction.lfu,
    ),
    EvictionInfo("fifo", "first loaded goes first", rule=eviction.fifo),
    EvictionInfo(
        "random",
        "any, by a hash of trace.seed",
        rule=eviction.random,
    ),
    EvictionInfo(
        "least-stale",
        "what the longest no forward pass has used goes",
        "SpecMD, arXiv 2602.03921",
        rule=eviction.least_stale,
    ),
    EvictionInfo(
        "hot-lru",
        "a static hot set stays, the rest is least recently used",
        params={"share": Param(0.5, "share of a layer's slots given to the hot set", 0.0, 1.0)},
        needs=frozenset({"popularity"}),
        rule=eviction.hot_lru,
    ),
    EvictionInfo(
        "predicted",
        "what the draft announced stays, the rest by fading uses",
        params={"decay": _DECAY},
        rule=eviction.predicted_next_use,
    ),
    EvictionInfo(
        "belady",
        "farthest next use goes: a bound, it reads the future",
        "Belady 1966",
        needs=frozenset({"future"}),
        rule=eviction.belady,
    ),
)

_PREFETCH = (
    PrefetchInfo("none", "demand loads only", rule=NONE),
    PrefetchInfo(
        "popularity",
        "the next layer's most used experts; uses fade as the eviction policy has them fade",
        params={"limit": Param(4, "experts a layer", 1)},
        rule=POPULARITY,
    ),
    PrefetchInfo(
        "gate",
        "what the next layer's router picks one layer early",
        "Mixtral-Offloading, arXiv 2312.17238",
        needs=frozenset({"gate"}),
        rule=GATE,
    ),
    PrefetchInfo(
        "draft-early",
        "one plan a window, from the first share of the draft",
        params={"share": Param(0.2, "share of the draft before the plan", 0.0, 1.0)},
        needs=frozenset({"paired"}),
        rule=ONCE,
    ),
    PrefetchInfo(
        "draft-late",
        "one plan a window, when the draft is done",
        params={"share": Param(1.0, "share of the draft before the plan", 0.0, 1.0)},
        needs=frozenset({"paired"}),
        rule=ONCE,
    ),
    PrefetchInfo(
        "draft-first",
        "a new plan after each of the first draft steps",
        "SpecMoEOff as arXiv 2511.14102 describes it",
        params={"steps": Param(2, "draft steps that plan", 1)},
        needs=frozenset({"paired"}),
        rule=FIRST_STEPS,
    ),
    PrefetchInfo(
        "paper",
        "the paper's chunked planner, as its artifact behaves",
        PAPER_SOURCE,
        needs=frozenset({"paired", "costs"}),
        rule=PAPER,
    ),
    PrefetchInfo(
        "continuous",
        "a new plan after every draft step, earliest deadline first, every expert awaited alone",
        needs=frozenset({"paired"}),
        rule=CONTINUOUS,
    ),
    PrefetchInfo("stream", "whole layers in order, needed or not", rule=STREAM),
    PrefetchInfo(
        "oracle",
        "the target's own routes, spoiled by knobs: a bound, it reads the future",
        params={
            "recall": Param(1.0, "share of what is needed that is announced", 0.0, 1.0),
            "precision": Param(1.0, "share of what is announced that is needed", 0.05, 1.0),
            "lead": Param(0, "layers ahead; 0 announces all when the window begins", 0),
        },
        needs=frozenset({"future"}),
        rule=ORACLE,
    ),
)

_DEPTH = (
    DepthInfo("never", "plain decoding, one token a pass", rule=FIXED),
    DepthInfo(
        "fixed",
        "always the same depth; a number as the policy's name means this",
        params={"depth": Param(4, "tokens drafted", 0, 64)},
        needs=frozenset({"paired"}),
        rule=FIXED,
    ),
    DepthInfo(
        "profile",
        "the best fixed depth, measured beforehand on the first part of the trace",
        PAPER_SOURCE,
        params={
            "candidates": Param("1,2,4,6,8,12,16", "depths tried"),
            "tokens": Param(64, "decode tokens of each try", 1),
        },
        needs=frozenset({"paired"}),
        rule=FIXED,
    ),
    DepthInfo(
        "governor",
        "at run time, the depth with the most expected tokens a second",
        f"objective of {PAPER_SOURCE}v1, with the target's own token counted",
        params={
            "most": Param(16, "deepest draft considered", 1, 64),
            "probe": Param(32, "windows between two tries of a neighbouring depth", 2),
        },
        needs=frozenset({"paired", "costs"}),
        rule=GOVERNED,
    ),
)

EVICTION: dict[str, EvictionInfo] = {info.name: info for info in _EVICTION}
PREFETCH: dict[str, PrefetchInfo] = {info.name: info for info in _PREFETCH}
DEPTH: dict[str, DepthInfo] = {info.name: info for info in _DEPTH}
