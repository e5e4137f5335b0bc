"""`specter-sim tune` as its users meet it: a process, its streams and its files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cli import COMMAND, printed, refused
from test_tune import Memory, unpaired

from specter_sim.cli.tune_output import _against_systems
from specter_sim.config import build, load_table
from specter_sim.setup import resolve
from specter_sim.sim import simulate
from specter_sim.tune.choice import BASELINE
from specter_sim.tune.scores import Objective, Scores
from specter_sim.tune.space import Space
from specter_sim.tune.tuning import conclude

QUICK = ("--budget", "20 MB", "--tokens", 128)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace without a draft: few choices."""
    return unpaired(tmp_path_factory.mktemp("trace"))


@pytest.fixture(scope="module")
def tuned(plain: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What tuning printed, and its folder."""
    folder = tmp_path_factory.mktemp("tune")
    return printed("tune", "--trace", plain, *QUICK, "--out", folder), folder


def document(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "tune.json").read_text())
    return told


def test_the_file_it_writes_runs_and_gives_the_printed_number(tuned: tuple[str, Path]) -> None:
    _, folder = tuned
    best, told = folder / "best.toml", document(folder)
    run = json.loads(printed("run", best, "--json"))
    whole = told["winner"]["whole"]
    assert run["result"]["tpot_s"] == pytest.approx(whole["tpot_s"], rel=1e-9)
    assert run["result"]["device_bytes"] == whole["device_bytes"] <= 20_000_000
    half = build(load_table(best), {"trace": {"part": "odd"}})
    held_out = simulate(resolve(half)).tpot_s
    assert held_out == pytest.approx(told["winner"]["held_out"]["tpot_s"], rel=1e-9)


def test_it_prints_the_answer_and_what_it_rests_on(tuned: tuple[str, Path]) -> None:
    text, folder = tuned
    told = document(folder)
    assert f"winner: {told['winner']['name']}" in text
    for part in ("tuned half", "held-out half", "whole trace", "runner-up", "next best"):
        assert part in text
    for preset in ("on-demand-lru", "coded-lru", "next-layer-gate"):
        assert re.search(rf"^{preset} .* ms", text, re.MULTILINE)
    assert re.search(r"specter cannot run: .*has no draft", text)
    assert "no verdict on speculation: no choice that drafts" in text
    assert "only choices without one were searched" in text


def test_a_rerun_computes_nothing_and_says_the_same(tuned: tuple[str, Path], plain: str) -> None:
    _, folder = tuned
    before = document(folder)
    again = json.loads(printed("tune", "--trace", plain, *QUICK, "--out", folder, "--json"))
    assert again["search"]["reused"] == again["search"]["scored"] == before["search"]["space"]
    assert again["winner"] == before["winner"] and again["worth"] == before["worth"]


def test_a_draft_is_judged_against_the_best_without(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra tune")
    options = ("--tokens", 128, "--budget", "28 MB", "--search", "optuna", "--trials", 20)
    told = json.loads(printed("tune", *options, "--out", tmp_path, "--json"))
    verdict = told["speculation"]
    with_draft, without = verdict["with"], verdict["without"]
    assert with_draft["choice"]["depth"] != "never" == without["choice"]["depth"]
    ratio = without["held_out_s"] / with_draft["held_out_s"]
    assert verdict["speedup"] == pytest.approx(ratio) and verdict["pays"] == (ratio > 1)
    assert told["winner"]["tuned"]["tpot_s"] <= min(s["tuned_s"] for s in told["systems"])


def test_a_better_preset_is_told_plainly() -> None:
    """The printed warning, from a winner that was unlucky on held-out text."""
    space = Space(build({"trace": {"tokens": 64}}), 24_000_000)
    scores = Scores(space, Objective.TPOT, Memory(), "test")
    scores.add([BASELINE])
    found = conclude(scores, space.base)
    assert "WARNING" not in _against_systems(found) or found.better_systems
    slow = replace(found.winner.held_out, tpot_s=0.03)
    text = _against_systems(replace(found, winner=replace(found.winner, held_out=slow)))
    assert text.startswith("WARNING") and "on-demand-lru (" in text
    assert "layer-streaming" not in text


# Interrupted and resumed


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_search_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    pytest.importorskip("optuna", reason="needs the extra tune")
    options = ["--tokens", "128", "--budget", "24 MB", "--search", "optuna", "--trials", "60"]
    command = ["tune", *options, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    journal = tmp_path / "optuna.journal"
    process = subprocess.Popen(
        [*COMMAND, *command], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 100
    while time.monotonic() < until and process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 60:
            break
        time.sleep(0.01)
    process.send_signal(how)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how), stderr
    if how == signal.SIGINT:
        assert stderr.decode().splitlines()[-1].startswith("error: interrupted")
    told = json.loads(printed(*command, "--json"))
    assert told["search"]["reused"] > 0
    lines = (tmp_path / "trials" / "results.jsonl").read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    # A score may have been kept whose trial was killed before it could be finished.
    assert len(keys) == len(set(keys)) >= told["search"]["scored"]


# Errors


def test_what_cannot_be_is_one_line(plain: str, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    assert re.search(
        r"in any form: the smallest budget that works is \d+ B",
        refused(2, "tune", "--trace", plain, "--budget", "1 MB", *out),
    )
    assert "did you mean" in refused(2, "tune", "--search", "optun", *out)
    assert 'unknown --objective "mean"' in refused(2, "tune", "--objective", "mean", *out)
    assert "24 gigs" in refused(2, "tune", "--budget", "24 gigs", *out)
    file = tmp_path / "file"
    file.write_text("in the way")
    assert "cannot write to" in refused(2, "tune", "--trace", plain, *QUICK, "--out", file)


def test_optuna_asked_for_and_missing_is_one_line() -> None:
    code = "import sys; sys.modules['optuna'] = None\nfrom specter_sim.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", "--search", "optuna"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --search optuna needs Optuna, which is not installed: pip install "
        "'specter[tune]', or use --search exhaustive"
    ]
