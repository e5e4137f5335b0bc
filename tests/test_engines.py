"""Which engine computes: the rule, and that both give the same rows."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specter_sim.config import RunConfig, build, resolved
from specter_sim.engine import ready
from specter_sim.results import Engine
from specter_sim.sweep import engines
from specter_sim.sweep.engines import COMPILING, engine_for, evaluate_once, local, simpy_seconds
from specter_sim.sweep.evaluate import evaluate, inputs_reader
from specter_sim.sweep.executor import run_tasks
from specter_sim.sweep.plan import Task, make_sweep, make_tasks
from specter_sim.sweep.store import Store


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been compiled."""
    monkeypatch.setattr(engines, "is_ready", lambda: False)
    yield


def config(tokens: int = 24, **tables: Any) -> RunConfig:
    return build({"trace": {"tokens": tokens}, "memory": {"slots": 12}, **tables})


def tasks_of(slots: list[int], **tables: Any) -> list[Task]:
    sweep = make_sweep({"trace": {"tokens": 24}, **tables, "axes": {"memory.slots": slots}}, (), ())
    return list(make_tasks(sweep, inputs_reader(), "1"))


def test_a_cold_start_does_not_compile_for_a_short_answer(cold: None) -> None:
    assert engine_for([config()]) is Engine.SIMPY
    assert engine_for([config()] * 2000) is Engine.COMPILED
    assert engine_for([config(tokens=100_000)]) is Engine.COMPILED
    assert engine_for([config()], Engine.COMPILED) is Engine.COMPILED


def test_a_warm_start_compiles_nothing_and_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "is_ready", lambda: True)
    assert engine_for([config()]) is Engine.COMPILED
    assert engine_for([config()], Engine.SIMPY) is Engine.SIMPY


def test_work_is_tokens_times_layers_and_an_unknown_model_is_none() -> None:
    assert simpy_seconds(config(tokens=1000)) == pytest.approx(1000 * 8 / 5000)
    assert simpy_seconds(config(model="absent.json")) == 0


def test_both_engines_give_the_same_row() -> None:
    table = resolved(config(preset="specter"))
    one, other = evaluate(table), evaluate(table, Engine.SIMPY)
    assert (one.pop("engine"), other.pop("engine")) == ("compiled", "simpy")
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, float):
            assert math.isclose(value, other[key], rel_tol=1e-9, abs_tol=1e-12), key
        else:
            assert value == other[key], key


def test_what_the_compiled_engine_cannot_run_says_so() -> None:
    pageable = config(machine={"host_memory": "20 MB"})
    row = evaluate_once(pageable, Engine.COMPILED)
    assert row["engine"] == "simpy"
    assert "run on the SimPy engine: some experts are not in pinned memory" in row["notes"]


def test_a_sweep_that_is_small_stays_on_simpy_when_cold(cold: None, tmp_path: Path) -> None:
    heard: list[str] = []
    with Store(tmp_path) as store:
        outcome = run_tasks(tasks_of([8, 12]), local(1, None, heard.append), store)
        rows = [record["result"] for record in store.records(outcome.keys)]
    assert heard == []
    assert [row["engine"] for row in rows] == ["simpy", "simpy"]


def test_a_sweep_that_pays_for_compiling_says_so(cold: None, tmp_path: Path) -> None:
    heard: list[str] = []
    with Store(tmp_path) as store:
        tasks = tasks_of([8, 12, 16], trace={"tokens": 12_000})  # 19 s each by SimPy
        outcome = run_tasks(tasks, local(1, None, heard.append), store)
        rows = [record["result"] for record in store.records(outcome.keys)]
        again = run_tasks(tasks, local(1, None, heard.append), store)
    assert heard == [COMPILING]
    assert [row["engine"] for row in rows] == ["compiled"] * 3
    assert (again.computed, again.reused) == (0, 3)


def test_threads_and_simpy_share_a_mixed_sweep(tmp_path: Path) -> None:
    axes = {"machine.host_memory": ["none", "20 MB"], "memory.slots": [8, 12]}
    sweep = make_sweep({"trace": {"tokens": 24}, "axes": axes}, (), ())
    with Store(tmp_path) as store:
        tasks = make_tasks(sweep, inputs_reader(), "1")
        outcome = run_tasks(tasks, local(2, Engine.COMPILED), store)
        rows = [record["result"] for record in store.records(outcome.keys)]
    assert [row["engine"] for row in rows] == ["compiled", "compiled", "simpy", "simpy"]


ASK = "from specter_sim.engine.ready import is_ready; import sys; sys.exit(not is_ready())"


def is_ready_in(folder: Path) -> bool:
    path = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", ASK], env=environment).returncode == 0


def test_a_mark_says_that_the_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready.make_ready()  # compiled or loaded now, and not once more into the empty folder
    assert not is_ready_in(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    ready.make_ready()
    assert len(list(tmp_path.glob("ready-*"))) == 1
    assert is_ready_in(tmp_path)
