"""`specter-sim bench`: what it prints. Speeds are not asserted, but for one loose ratio."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from specter_sim.cli import bench as verb
from specter_sim.cli import speed
from specter_sim.cli.app import app
from specter_sim.config import build
from specter_sim.engine.run import simulate_compiled
from specter_sim.setup import resolve
from specter_sim.sim import simulate
from specter_traces import SpecterError

LEAST_RATIO = 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lookups."""
    monkeypatch.setattr(speed, "REPLAYED", (2, 40, 4, 300))


PEER = Path(__file__).parent.parent / "benchmarks" / "libcachesim_peer.py"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.usefixtures("small")
def test_replays_state_conditions_and_peer() -> None:
    pytest.importorskip("libcachesim", reason="pip install '.[oracle]'")
    out = run("--part", "replay", "--repeats", 1, "--peer", PEER).stdout
    assert "replays: synthetic routes, 2 layers x 40 experts, top-4, 300 tokens, 32 slots" in out
    for policy in ("lru", "fifo", "lfu", "belady"):
        line = next(line for line in out.splitlines() if line.startswith(f"replay, {policy}"))
        assert "libcachesim" in line and ("reached" in line or "missed" in line)
    assert "medians of 1 runs" in out and "numba" in out


@pytest.mark.usefixtures("small")
def test_json_holds_every_speed() -> None:
    document = json.loads(run("--part", "replay", "--repeats", 2, "--json").stdout)
    speeds = {one["what"]: one for one in document["speeds"]}
    assert len(speeds) == 5 and all(one["value"] > 0 for one in speeds.values())
    assert speeds["replay, lru"]["peer"] == "libcachesim (no --peer)"
    assert speeds["replay, lru"]["ratio"] is None
    assert document["versions"]["numba"] != "not installed" and document["date"]


@pytest.mark.usefixtures("small")
def test_a_peer_that_fails_is_one_line(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text("raise SystemExit('no such library')")
    told = str(run("--part", "replay", "--repeats", 1, "--peer", script).exception)
    assert "no such library" in told and "\n" not in told


def test_a_different_count_of_misses_is_an_error() -> None:
    one = speed.Speed("replay, lru", 2e6, "lookups/s")
    same = speed._beside(one, {"misses": 7, "seconds": 0.5}, 7, 1_000_000)
    assert same.ratio == 1.0 and same.peer_value == 2e6
    with pytest.raises(SpecterError, match="7 misses, libcachesim counts 8"):
        speed._beside(one, {"misses": 8, "seconds": 0.5}, 7, 1_000_000)


def test_an_unknown_part_is_named() -> None:
    assert 'no part "replays"' in str(run("--part", "replays").exception)


def test_goals_are_judged_by_their_unit() -> None:
    rate = speed.Speed("a", 5e6, "lookups/s", 4e6)
    seconds = speed.Speed("b", 5.0, "s", 4.0)
    assert verb._goal(rate) == ">= 4 M: reached" and verb._goal(seconds) == "<= 4 s: missed"


def test_lookups_are_written_as_the_library_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "lookups"
    speed._write_lookups(np.array([3, 1, 3], dtype=np.uint16), np.array([0, 3]), 4, path)
    rows = np.frombuffer(
        path.read_bytes(), [("t", "<u4"), ("id", "<u8"), ("s", "<u4"), ("n", "<i8")]
    )
    assert rows["id"].tolist() == [4, 2, 4] and rows["n"].tolist() == [2, -1, -1]


def test_the_compiled_engine_is_far_faster_than_the_simpy_world() -> None:
    """Loosely: the table says how far. The least of several tries: a busy machine must pass."""
    setup = resolve(build({"preset": "specter"}, {"trace": {"tokens": 512}}))
    simulate_compiled(setup)  # compiles
    assert least_s(simulate, setup, 2) > LEAST_RATIO * least_s(simulate_compiled, setup, 7)


def least_s(work: Any, setup: Any, tries: int) -> float:
    """CPU seconds."""

    def once() -> float:
        started = time.process_time()
        work(setup)
        return time.process_time() - started

    return min(once() for _ in range(tries))
