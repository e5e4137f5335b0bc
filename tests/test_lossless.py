"""Lossless: what a session writes is what plain greedy decoding writes, token for token.

Every policy that runs live, every depth and every number of slots, on toys of every architecture.
The ordinary suite walks through the combinations so that every two choices meet;
`pytest --all-lossless tests/test_lossless.py` runs all of them (hours).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, CANNOT_SPECULATE, NEW_TOKENS, PROMPT, decode, plain_text
from lossless_cases import GOVERNOR, SYSTEMS, Case, all_cases, config_of, some_cases
from toy_checkpoints import make
from toy_traces import toy_trace

from specter_runtime.checkpoint import Checkpoint
from specter_runtime.devices import DeviceKind
from specter_runtime.session import Session, SessionOptions
from specter_sim.policies import DEPTH, EVICTION, PREFETCH
from specter_traces import save


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


def open_toy(
    case: Case, trace: Path, *, device: DeviceKind = DeviceKind.IMMEDIATE, model: Any = None
) -> Session:
    """A session of a fresh toy, whose slots are poisoned and whose loads are compared."""
    model = make(ARCHITECTURES[case.architecture]) if model is None else model
    checkpoint = Checkpoint(case.architecture, model, None, "float32", "")
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


@pytest.mark.parametrize("depth", [0, 4])
def test_the_second_request_finds_its_experts_and_writes_the_same(depth: int) -> None:
    case = Case("mellum", "predicted", depth, "all")
    with open_toy(case, Path()) as session:
        assert written(session) == plain_text("mellum").tokens
        session.forget_requests()
        assert written(session) == plain_text("mellum").tokens
        assert session.result().loads == 0


@pytest.mark.parametrize("slots", ["minimum", "all"])
def test_layers_may_have_experts_of_different_sizes(slots: str) -> None:
    case = Case("mixtral", "continuous", 4, slots)
    expected = decode(with_a_wider_layer(make(ARCHITECTURES["mixtral"]))).tokens
    assert expected != plain_text("mixtral").tokens
    model = with_a_wider_layer(make(ARCHITECTURES["mixtral"]))
    with open_toy(case, Path(), model=model) as session:
        assert len(set(session.prepared.store.expert_bytes)) == 2
        assert written(session) == expected


def with_a_wider_layer(model: Any) -> Any:
    """A Mixtral whose second layer has experts of another width."""
    config = type(model.config)(**{**model.config.to_dict(), "intermediate_size": 80})
    wider: Any = type(model.model.layers[1].mlp.experts)(config)
    wider.config = model.config
    generator = torch.Generator().manual_seed(0)
    for weight in wider.parameters():
        torch.nn.init.normal_(weight, std=0.2, generator=generator)
    model.model.layers[1].mlp.experts = wider
    return model


def test_a_paced_link_changes_no_token() -> None:
    case = Case("qwen2-moe", "continuous", 4, "minimum")
    with open_toy(case, Path(), device=DeviceKind.EMULATED) as session:
        assert written(session) == plain_text("qwen2-moe").tokens
        assert session.result().stall_demand_s > 0


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
