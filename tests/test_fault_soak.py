"""The soak over a failing link, in small: `benchmarks/fault_soak.py` on a toy."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specter_runtime import slots
from specter_runtime.devices.device import LiveDevice

NAME = "fault_soak"


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def soak(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The benchmark as a module."""
    path = request.config.rootpath / "benchmarks" / f"{NAME}.py"
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[NAME]


def run(soak: Any, file: Path, *given: str) -> tuple[int, dict[str, Any]]:
    arguments = ["--toy", "--json", str(file), *given]
    code: int = soak.main(arguments)
    return code, json.loads(file.read_text())


def test_no_token_is_wrong_and_nothing_grows(soak: Any, tmp_path: Path) -> None:
    shape = ("--tokens", "240", "--new-tokens", "16", "--warm-up", "1")
    code, found = run(soak, tmp_path / "soak.json", *shape, "--share", "0.05", "--check")
    assert code == 0 and found["wrong_tokens"] == 0
    assert found["tokens"] == 240 and found["requests"] == 15
    assert found["failed_copies_made_good"] > 20
    assert {sample["system"] for sample in found["samples"]} == set(soak.SYSTEMS)
    assert abs(found["tensor_bytes_per_1000_tokens"]) < 1e5  # caches that are kept: 335 kB
    assert len(set(found["tensor_bytes_between_systems"][2:])) == 1  # the draft came before
    assert all(sample["rss_bytes"] > sample["tensor_bytes"] > 0 for sample in found["samples"])


def test_damage_that_nobody_checks_is_found(
    soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is worth something: copies that were cut short show as wrong tokens.

    With NaN as poison they would end the run at once.
    """
    monkeypatch.setattr(LiveDevice, "_is_whole", lambda *_: True)
    monkeypatch.setattr(slots, "_POISON", 0)
    monkeypatch.setattr(soak, "SYSTEMS", {"on demand": {"policy.depth": 0}})
    shape = ("--tokens", "60", "--new-tokens", "20", "--slots", "2")
    code, found = run(soak, tmp_path / "soak.json", *shape, "--share", "0.1")
    assert code == 1 and found["wrong_tokens"] > 0


def test_growth_is_a_slope_beside_levels(soak: Any) -> None:
    def sample(system: str, tokens: int, rss_bytes: int) -> Any:
        return soak.Sample(system, tokens, 10, 0, 0, rss_bytes, 0)

    samples = [sample("a", 10 * n, 500 + 20 * n) for n in range(5)]
    samples += [sample("b", 50 + 10 * n, 90_000 + 20 * n) for n in range(5)]
    samples[0] = sample("a", 0, 10**9)  # warming up
    assert soak.growth(samples, "rss_bytes", 1) == pytest.approx(2000)
    assert soak.growth(samples, "tensor_bytes", 1) == 0
    assert soak.growth(samples, "rss_bytes", 4) is None


def test_texts_are_compared_to_their_ends(soak: Any) -> None:
    assert soak.wrong_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert soak.wrong_tokens([1, 5, 3], [1, 2, 3, 4]) == 2
    assert soak.wrong_tokens([], [1, 2]) == 2
