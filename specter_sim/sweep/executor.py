"""Compute the tasks of a sweep that have no result yet, on several processes, losing nothing.

The function that computes one configuration is a parameter: it takes a resolved configuration
(plain tables) and returns the result as a flat table. It must be importable, because workers are
started afresh ("spawn"): no state is shared and no lock is inherited.
"""

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specter_sim.config import Table, resolved
from specter_sim.sweep.plan import Task
from specter_sim.sweep.store import Record, Store
from specter_traces.errors import SpecterError

Evaluate = Callable[[Table], dict[str, Any]]
Progress = Callable[[int, int], None]

# Two tasks a worker keep it busy while the parent writes, and bound what an interrupt throws away.
QUEUED_PER_WORKER = 2


@dataclass(frozen=True)
class Outcome:
    """What a sweep came to: a record for every task, in their order, and how many were computed."""

    records: list[Record]
    computed: int
    reused: int

    @property
    def failures(self) -> list[Record]:
        """The records of configurations that could not run."""
        return [record for record in self.records if "error" in record]

    @property
    def results(self) -> list[Record]:
        """The records that hold a result."""
        return [record for record in self.records if "result" in record]


def run_tasks(
    tasks: Sequence[Task],
    evaluate: Evaluate,
    store: Store,
    workers: int = 1,
    progress: Progress = lambda done, total: None,
) -> Outcome:
    """Compute what the store lacks and append every result as it comes.

    A configuration that raises SpecterError gets a record with its error and the others go on. Any
    other exception ends the run; what is in the store stays.
    """
    known = {task.key: store.result(task.key) for task in tasks}
    missing = [task for task in tasks if known[task.key] is None]
    progress(len(tasks) - len(missing), len(tasks))
    computed = _serially if min(workers, len(missing)) <= 1 else _in_processes
    # Closed at once on Ctrl-C: a generator left to the garbage collector would leave its workers.
    with contextlib.closing(computed(missing, evaluate, workers)) as records:
        for count, record in enumerate(records, start=len(tasks) - len(missing) + 1):
            store.append(record)
            known[record["key"]] = record
            progress(count, len(tasks))
    ordered = [found for task in tasks if (found := known[task.key]) is not None]
    return Outcome(ordered, computed=len(missing), reused=len(tasks) - len(missing))


def estimate_s(tasks: Sequence[Task], evaluate: Evaluate, workers: int, samples: int = 3) -> float:
    """Seconds that computing the tasks would take, from computing a few of them here."""
    count = min(samples, len(tasks))
    picked = [tasks[index * len(tasks) // count] for index in range(count)]
    evaluate_one(picked[0], evaluate)  # the first also pays for imports and reading the trace
    started = time.perf_counter()
    for task in picked:
        evaluate_one(task, evaluate)
    each_s = (time.perf_counter() - started) / count
    return each_s * len(tasks) / max(1, min(workers, len(tasks)))


def evaluate_one(task: Task, evaluate: Evaluate) -> Record:
    """The record of one task: its result, or the one-line reason why it has none."""
    record: Record = {
        "key": task.key,
        "computed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": resolved(task.config),
    }
    try:
        result = evaluate(record["config"])
        return record | {"result": {key: _finite(value) for key, value in result.items()}}
    except SpecterError as error:
        return record | {"error": str(error)}


def _finite(value: Any) -> Any:
    """JSON knows neither infinity nor "not a number": both are written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _serially(
    tasks: Sequence[Task], evaluate: Evaluate, workers: int
) -> Generator[Record, None, None]:
    for task in tasks:
        yield evaluate_one(task, evaluate)


def _in_processes(
    tasks: Sequence[Task], evaluate: Evaluate, workers: int
) -> Generator[Record, None, None]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _prepare_worker)
    waiting = iter(tasks)
    running: set[Future[Record]] = set()
    try:
        while True:
            while len(running) < QUEUED_PER_WORKER * workers and (task := next(waiting, None)):
                running.add(pool.submit(evaluate_one, task, evaluate))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise SpecterError(
            "a worker process died (out of memory?): rerun to go on, perhaps with fewer --workers"
        ) from None
    except BaseException:
        _end(pool)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _end(pool: ProcessPoolExecutor) -> None:
    """Stop the workers in the middle of their tasks: whoever interrupts does not want to wait."""
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # a killed parent cannot tell its workers to stop
        os._exit(1)
