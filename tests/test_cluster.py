"""Sweeps on a cluster: a real scheduler and real workers on loopback, and what dies with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_traces import toy_trace

from specter_sim import __version__
from specter_sim.config import resolved
from specter_sim.results import Engine
from specter_sim.sweep import cluster, remote
from specter_sim.sweep.evaluate import inputs_of
from specter_sim.sweep.executor import Outcome, run_tasks
from specter_sim.sweep.plan import Task, make_sweep, make_tasks
from specter_sim.sweep.pools import one_by_one
from specter_sim.sweep.store import RECORDS, Store
from specter_traces import save
from specter_traces.errors import SpecterError, UsageError

distributed = pytest.importorskip("distributed", reason="needs the extra cluster")

START_S = 60


class Cluster:
    """A scheduler and two workers, each a process of its own; ports chosen by the system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        told = folder / "scheduler.json"
        self.scheduler = self._start("scheduler", "--port", "0", "--scheduler-file", str(told))
        _wait(lambda: _is_document(told))
        self.address: str = json.loads(told.read_text())["address"]
        self.workers = [self.new_worker(), self.new_worker()]
        with self.client() as client:
            client.wait_for_workers(2, timeout=START_S)

    def new_worker(self) -> subprocess.Popen[bytes]:
        return self._start("worker", self.address, "--no-nanny", "--nthreads", "1")

    def client(self) -> Any:
        return distributed.Client(self.address, timeout=START_S, set_as_default=False)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self, what: str, *arguments: str) -> subprocess.Popen[bytes]:
        common = ("--host", "127.0.0.1", "--no-dashboard")
        process = subprocess.Popen(
            [sys.executable, "-m", f"distributed.cli.dask_{what}", *arguments, *common],
            cwd=self._folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process


def environment() -> dict[str, str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _is_document(path: Path) -> bool:
    """Whether a file that another process writes in place is there, to its end."""
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def _wait(happened: Any) -> None:
    deadline = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that tests leave as it is."""
    with contextlib.closing(_Ending(Cluster(tmp_path_factory.mktemp("cluster")))) as held:
        yield held.cluster


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test, which may kill what it likes of it."""
    with contextlib.closing(_Ending(Cluster(tmp_path))) as held:
        yield held.cluster


class _Ending:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def close(self) -> None:
        self.cluster.end()


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these short sweeps submit more while answers come."""
    monkeypatch.setattr(cluster, "LEAST_QUEUED", 6)


def tasks_of(slots: list[int], **tables: Any) -> list[Task]:
    axes = {"memory.slots": slots}
    table = {"trace": {"tokens": 32}} | tables | {"axes": axes}
    return list(make_tasks(make_sweep(table, (), ()), inputs_of, __version__))


def compute_on(cluster_: Cluster, tasks: list[Task], folder: Path, progress: Any = None) -> Outcome:
    """On the SimPy engine: slow enough to be killed in the middle, and nothing to compile."""
    on = cluster.on_cluster(cluster_.address, Engine.SIMPY)
    with Store(folder) as store:
        return run_tasks(tasks, on, store, progress or (lambda done, total: None))


def records_in(folder: Path) -> list[dict[str, Any]]:
    path = folder / RECORDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_cluster_gives_what_this_machine_gives(steady: Cluster, tmp_path: Path) -> None:
    tasks = tasks_of([3, 8, 12])
    assert compute_on(steady, tasks, tmp_path / "there").failed == 1
    with Store(tmp_path / "here") as store:
        run_tasks(tasks, one_by_one(remote_free), store)

    def told(folder: Path) -> dict[str, Any]:
        return {
            r["key"]: (r["config"], r.get("result"), r.get("error")) for r in records_in(folder)
        }

    assert told(tmp_path / "there") == told(tmp_path / "here")


def remote_free(table: dict[str, Any]) -> dict[str, Any]:
    from specter_sim.sweep.evaluate import evaluate

    return evaluate(table, Engine.SIMPY)


def test_a_file_is_found_by_workers_in_another_folder(
    steady: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(toy_trace(8, 48, 6, (80,)), tmp_path / "toy.safetensors")
    monkeypatch.chdir(tmp_path)
    tasks = tasks_of([8], trace={"path": "toy.safetensors", "tokens": 16})
    assert compute_on(steady, tasks, tmp_path / "out").failed == 0
    (record,) = records_in(tmp_path / "out")
    assert record["config"]["trace"]["path"] == "toy.safetensors"


def test_another_version_is_refused(
    steady: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "__version__", "0.0.0")
    with pytest.raises(SpecterError, match=r"runs specter .*, and this is 0\.0\.0: install"):
        compute_on(steady, tasks_of([8]), tmp_path)


def test_other_contents_are_refused(
    steady: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "inputs_reader", lambda: lambda config: "other")
    with pytest.raises(SpecterError, match="has other contents in the files of trace 'tiny-moe'"):
        compute_on(steady, tasks_of([8]), tmp_path)


def test_a_file_that_a_worker_does_not_have_is_refused() -> None:
    (task,) = tasks_of([8])
    table = resolved(task.config)
    table["trace"]["path"] = "absent.safetensors"
    order = {"version": __version__, "inputs": "", "engine": "simpy", "config": table}
    refused = json.loads(remote.compute(json.dumps(order)))["refused"]
    assert "cannot read what this machine can: no bundled trace and no file" in refused


def test_a_killed_worker_loses_and_doubles_nothing(doomed: Cluster, tmp_path: Path) -> None:
    tasks = tasks_of(list(range(6, 46)), trace={"tokens": 128})
    busy: list[int] = []

    def kill(done: int, total: int) -> None:
        if done == 5:
            with doomed.client() as client:
                busy.extend(map(len, client.processing().values()))
            doomed.workers[0].kill()

    outcome = compute_on(doomed, tasks, tmp_path / "out", kill)
    assert doomed.workers[0].wait() == -signal.SIGKILL
    assert len(busy) == 2 and all(busy)  # killed in the middle of its work
    assert (outcome.computed, outcome.failed) == (40, 0)
    keys = [record["key"] for record in records_in(tmp_path / "out")]
    assert sorted(keys) == sorted(task.key for task in tasks)


def test_ctrl_c_keeps_what_came_and_cancels_the_rest(steady: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out"
    axis = f"memory.slots={list(range(6, 46))}"
    arguments = ["--cluster", steady.address, "--engine", "simpy", "--out", str(out)]
    running = subprocess.Popen(
        [
            *(sys.executable, "-c", "from specter_sim.cli import main; main()", "sweep"),
            *(*arguments, "--axis", axis, "--set", "trace.tokens=128"),
        ],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait(lambda: len(records_in_whole_lines(out)) >= 3)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=30)
    assert running.returncode == 130
    assert stderr.splitlines()[-1].startswith("error: interrupted; what was computed is in")
    assert "Traceback" not in stderr
    assert len({record["key"] for record in records_in(out)}) == len(records_in(out)) >= 3
    with steady.client() as client:
        _wait(lambda: not any(client.processing().values()))


def records_in_whole_lines(folder: Path) -> list[str]:
    path = folder / RECORDS
    return path.read_text().splitlines() if path.exists() else []


def test_a_lost_scheduler_is_one_line(doomed: Cluster, tmp_path: Path) -> None:
    tasks = tasks_of(list(range(6, 46)), trace={"tokens": 128})

    def kill(done: int, total: int) -> None:
        if done == 2:
            doomed.scheduler.kill()

    with pytest.raises(SpecterError, match="the scheduler is gone") as caught:
        compute_on(doomed, tasks, tmp_path / "out", kill)
    assert "\n" not in str(caught.value)
    assert len(records_in(tmp_path / "out")) >= 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("address", ["x://y:1", "", "host", "tcp://host"])
def test_what_is_no_address_is_said(address: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no scheduler: write it like tcp://host:8786"):
        next(cluster.on_cluster(address, None)(iter(tasks_of([8]))))


def test_an_unreachable_scheduler_is_one_line_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", "from specter_sim.cli import main; main()", "sweep"]
    done = subprocess.run(
        [*command, "--cluster", address, "--out", str(tmp_path / "out")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no scheduler answers at ")
    assert time.monotonic() - began < 20  # 5 s of waiting, and a start on a busy machine


def test_a_scheduler_without_workers_is_one_line(doomed: Cluster, tmp_path: Path) -> None:
    for worker in doomed.workers:
        worker.kill()
        worker.wait()
    with doomed.client() as client:
        _wait(lambda: not client.nthreads())
    with pytest.raises(SpecterError, match="has no worker: start one with dask worker tcp://"):
        compute_on(doomed, tasks_of([8]), tmp_path / "out")
