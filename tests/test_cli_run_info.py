"""`specter-run info`: the sizes it tells are those that a run then has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from specter_run import run
from toy_checkpoints import TOYS, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(TOYS["qwen3-moe"], tmp_path_factory.mktemp("models") / "toy")


def facts(capsys: Capture, *options: object) -> dict[str, Any]:
    return run(capsys, "info", "--json", *options).document()


def test_the_table_fits_a_terminal(capsys: Capture) -> None:
    told = run(capsys, "info", "--vram", "24 MiB", "--depth", 4, "--context", 200)
    assert told.code == 0
    assert all(len(line) <= 80 for line in told.out.splitlines())
    for word in ("dense", "draft", "a slot", "KV", "host", "smallest", "largest", "here"):
        assert f"\n{word} " in told.out
    assert "8 MoE layers of 48 experts, top-6" in told.out


def test_what_does_not_fit_is_no_failure(capsys: Capture) -> None:
    told = run(capsys, "info", "--vram", "10 MB")
    assert told.code == 0 and "does not run in 10.0 MB" in " ".join(told.out.split())


def test_a_draft_takes_what_slots_lose(capsys: Capture) -> None:
    without, drafted = (
        facts(capsys, "--vram", "40 MB", "--depth", depth) for depth in ("never", "4")
    )
    assert without["draft_bytes"] == 0 < drafted["draft_bytes"]
    assert sum(drafted["fit"]["slots"]) < sum(without["fit"]["slots"])
    for told in (without, drafted):
        assert 40e6 - told["slot_bytes"][0] < told["fit"]["total_bytes"] <= 40e6


@pytest.mark.parametrize("depth", ["never", "3"])
def test_the_smallest_budget_is_the_smallest(
    toy: Path, depth: str, tmp_path: Path, capsys: Capture
) -> None:
    prompt = tmp_path / "ids.jsonl"
    prompt.write_text(json.dumps({"tokens": [3, 4, 5]}))
    smallest = facts(capsys, toy, "--context", 8, "--depth", depth)["smallest_budget_bytes"]
    asked = ("--prompt-file", prompt, "--new-tokens", 5, "--depth", depth)
    given = (toy, *asked, "--device", "immediate")
    assert run(capsys, "generate", *given, "--vram", f"{smallest} B").code == 0
    told = run(capsys, "generate", *given, "--vram", f"{smallest - 1} B")
    assert told.code == 2 and f"the smallest budget that works is {smallest} B" in told.err


def test_every_expert_is_resident_in_the_largest(toy: Path, capsys: Capture) -> None:
    largest = facts(capsys, toy)["all_resident_bytes"]
    fit = facts(capsys, toy, "--vram", f"{largest} B")["fit"]
    assert fit["resident_share"] == 1 and fit["total_bytes"] == largest
    assert facts(capsys, toy, "--vram", f"{largest - 1} B")["fit"]["resident_share"] < 1
