"""Lossless: what a session writes is what plain greedy decoding writes, token for token.

Every policy that runs live, every depth and every number of slots, on toys of every architecture.
The ordinary suite walks through the combinations so that every two choices meet;
`pytest --all-lossless tests/test_lossless.py` runs all of them (hours).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from architectures import ARCHITECTURES, CANNOT_SPECULATE, NEW_TOKENS, PROMPT, plain_text
from toy_checkpoints import make
from toy_traces import toy_trace

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.devices import DeviceKind
from specter_runtime.session import Session, SessionOptions
from specter_sim.config import RunConfig
from specter_sim.policies import DEPTH, EVICTION, PREFETCH
from specter_traces import save

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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cases by a flag, else some."""
    if "case" in metafunc.fixturenames:
        wanted = all_cases() if metafunc.config.getoption("--all-lossless") else some_cases()
        metafunc.parametrize("case", wanted, ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Toys are too small for threads, which only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def popular(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Traces that say which experts are popular, by MoE layers of the toy."""
    folder = tmp_path_factory.mktemp("popular")
    depths = sorted({toy.moe_layers for toy in ARCHITECTURES.values()})
    for layers in depths:
        save(toy_trace(layers, experts=8, top_k=2), folder / f"{layers}.safetensors")
    return {layers: folder / f"{layers}.safetensors" for layers in depths}


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


def open_toy(case: Case, trace: Path, device: DeviceKind = DeviceKind.IMMEDIATE) -> Session:
    """A session of a fresh toy, whose slots are poisoned and whose loads are compared."""
    checkpoint = Checkpoint(case.architecture, make(ARCHITECTURES[case.architecture]), None, "", "")
    options = SessionOptions(
        device=device, context_tokens=96, chunk_tokens=5, poison=True, check=True
    )
    return Session.of(checkpoint, config_of(case, trace), options)


def written(session: Session) -> list[int]:
    """The greedy text of a session behind PROMPT."""
    return [token for part in session.generate(PROMPT, NEW_TOKENS) for token in part]


def test_a_session_writes_what_plain_decoding_writes(case: Case, popular: dict[int, Path]) -> None:
    speculates = case.architecture not in CANNOT_SPECULATE
    with open_toy(case, popular[ARCHITECTURES[case.architecture].moe_layers]) as session:
        assert written(session) == plain_text(case.architecture).tokens
        result = session.result()
        assert session.prepared.speculates == (speculates and case.depth > 0)
        if not session.prepared.speculates:
            assert result.mean_depth == 0
        elif case.system != GOVERNOR:  # which may stop
            assert 0 < result.mean_depth <= case.depth
        assert any("no speculation" in note for note in session.notes) == (
            case.depth > 0 and not speculates
        )


def test_some_cases_meet_every_two_choices() -> None:
    """Wherever a draft is needed, depth 0 makes no sense and is not met."""
    speculating = [case for case in some_cases() if case.architecture not in CANNOT_SPECULATE]
    assert {case.architecture for case in some_cases()} == set(ARCHITECTURES)
    for one, other in combinations(("system", "depth", "slots"), 2):
        wanted = {(getattr(case, one), getattr(case, other)) for case in all_cases()}
        assert {(getattr(case, one), getattr(case, other)) for case in speculating} == wanted


def test_systems_name_every_policy_that_runs_live() -> None:
    policies = [system.get("policy", {}) for system in SYSTEMS.values()]
    for kind, table, default in (
        ("eviction", EVICTION, "lru"),
        ("prefetch", PREFETCH, "none"),
        ("depth", DEPTH, "never"),
    ):
        named = {policy.get(kind, default) for policy in policies}
        live = {name for name, info in table.items() if "future" not in info.needs}
        assert named | ({"fixed"} if kind == "depth" else set()) == live - {"profile"}
