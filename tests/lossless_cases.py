"""The systems that live sessions are tested under, and which toys meet which of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from architectures import ARCHITECTURES, CANNOT_SPECULATE

from specter_sim.config import RunConfig
from specter_sim.policies import DEPTH, PREFETCH

DEPTHS = (8, 0, 4, 1)
SLOTS = ("minimum", "half", "all")
CASES_PER_ARCHITECTURE = 2
GOVERNOR = "governor"

# The numbers of systems, depths and slots have no common factor, so that counting through all
# three at once meets every pair.
SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    "lru": {},
    "lfu": {"policy": {"eviction": "lfu"}},
    "fifo-in-rounds": {"policy": {"eviction": "fifo"}, "memory": {"allow_rounds": True}},
    "random": {"policy": {"eviction": "random"}},
    "least-stale": {"policy": {"eviction": "least-stale"}},
    "hot-lru": {"policy": {"eviction": "hot-lru"}},
    "predicted": {"policy": {"eviction": "predicted"}, "memory": {"layout": "global"}},
    "popularity": {"policy": {"prefetch": "popularity"}, "memory": {"initial": "popular"}},
    "gate": {"policy": {"prefetch": "gate"}},
    "draft-early": {"policy": {"prefetch": "draft-early"}},
    "draft-late": {"policy": {"prefetch": "draft-late"}, "experts": {"draft_bits": 2}},
    "draft-first": {"policy": {"prefetch": "draft-first"}},
    "paper": {
        "policy": {"prefetch": "paper"},
        "memory": {"staging_slots": 4, "initial": "highest"},
        "experts": {"grouped": False},
    },
    "continuous": {"policy": {"prefetch": "continuous"}},
    "stream": {
        "policy": {"eviction": "hot-lru", "prefetch": "stream"},
        "memory": {"layout": "global"},
    },
    "continuous-global": {
        "policy": {"eviction": "predicted", "prefetch": "continuous"},
        "memory": {"layout": "global"},
        "experts": {"draft_bits": 3},
    },
    "staged-demand": {
        "policy": {"eviction": "lfu", "eviction_params": {"forget": True}, "demand": "staging"},
        "memory": {"staging_slots": 2},
    },
    "one-by-one": {
        "policy": {"prefetch": "continuous"},
        "experts": {"grouped": False, "draft_bits": 8},
    },
    GOVERNOR: {"policy": {"eviction": "predicted", "prefetch": "continuous", "depth": GOVERNOR}},
}


class Case(NamedTuple):
    """One architecture under one system."""

    architecture: str
    system: str
    depth: int
    slots: str

    def __str__(self) -> str:
        return f"{self.architecture}-{self.system}-depth{self.depth}-{self.slots}"


def drafts_always(system: str) -> bool:
    """Whether a system makes no sense without a draft."""
    policy = SYSTEMS[system].get("policy", {})
    needs = (
        PREFETCH[policy.get("prefetch", "none")].needs | DEPTH[policy.get("depth", "never")].needs
    )
    return "paired" in needs


def all_cases() -> list[Case]:
    """Everything that makes sense, architecture by architecture."""
    return [
        Case(*choice)
        for choice in product(ARCHITECTURES, SYSTEMS, sorted(DEPTHS), SLOTS)
        if choice[2] or not drafts_always(choice[1])
    ]


def some_cases() -> list[Case]:
    """A few of each architecture, counted through those that speculate and through the others."""
    systems, counts = list(SYSTEMS), [0, 0]
    cases = []
    for architecture in ARCHITECTURES:
        kind = architecture in CANNOT_SPECULATE
        for _ in range(CASES_PER_ARCHITECTURE):
            turn = counts[kind]
            counts[kind] += 1
            system, depth = systems[turn % len(systems)], DEPTHS[turn % len(DEPTHS)]
            if not depth and drafts_always(system):
                depth = 4
            cases.append(Case(architecture, system, depth, SLOTS[turn % len(SLOTS)]))
    return cases


def config_of(case: Case, trace: Path) -> RunConfig:
    """The configuration of a case; `trace` knows which experts are popular."""
    toy, system = ARCHITECTURES[case.architecture], SYSTEMS[case.system]
    memory, experts = system.get("memory", {}), system.get("experts", {})
    least = 1 if memory.get("allow_rounds") else toy.top_k
    slots = {"minimum": least, "half": max(least, toy.num_experts // 2), "all": toy.num_experts}
    policy = {"depth": str(case.depth), **system.get("policy", {})}
    if policy["depth"] == GOVERNOR:
        policy["depth_params"] = {"most": case.depth}
    return RunConfig.model_validate(
        {
            "trace": {"path": str(trace)},
            "memory": {"slots": slots[case.slots], **memory},
            "experts": {"group_size": 32, **experts},
            "policy": policy,
        }
    )
