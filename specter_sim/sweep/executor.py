"""Compute the tasks of a sweep that have no result yet, losing nothing.

How they are computed is a parameter (see `pools` and `cluster`): something that turns tasks into
records, in any order. Tasks come one by one and records go to the store as they come, so memory
does not grow with their number.
"""

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from specter_sim.config import Table, resolved
from specter_sim.sweep.plan import Task
from specter_sim.sweep.store import Record, Store
from specter_traces.errors import SpecterError

Evaluate = Callable[[Table], dict[str, Any]]
Progress = Callable[[int, int], None]
Compute = Callable[[Iterator[Task]], Generator[Record, None, None]]


@dataclass
class Outcome:
    """What a sweep came to: the keys of its records in the order of the tasks, and counts."""

    keys: list[str] = field(default_factory=list)
    computed: int = 0
    reused: int = 0
    failed: int = 0
    first_error: str | None = None

    @property
    def has_results(self) -> bool:
        """Whether any configuration has a result."""
        return self.failed < len(self.keys)


def run_tasks(
    tasks: Iterable[Task],
    compute: Compute,
    store: Store,
    progress: Progress = lambda done, total: None,
    total: int = 0,
) -> Outcome:
    """Compute what the store lacks and append every record as it comes.

    `total` is how many tasks there are, as far as that is known beforehand.
    A configuration that raises SpecterError gets a record with its error and the others go on. Any
    other exception ends the run; what is in the store stays.
    """
    outcome = Outcome()
    missing = _missing(tasks, store, outcome)
    # Closed at once on Ctrl-C: a generator left to the garbage collector would leave its workers.
    with contextlib.closing(compute(missing)) as records:
        for record in records:
            store.append(record)
            outcome.computed += 1
            if "error" in record:
                outcome.failed += 1
                outcome.first_error = outcome.first_error or record["error"]
            progress(outcome.computed + outcome.reused, total)
    return outcome


def _missing(tasks: Iterable[Task], store: Store, outcome: Outcome) -> Iterator[Task]:
    for task in tasks:
        outcome.keys.append(task.key)
        if store.has_result(task.key):
            outcome.reused += 1
        else:
            yield task


@dataclass(frozen=True)
class Estimate:
    """How many configurations there are, and how long computing all of them would take."""

    configurations: int
    seconds: float


def estimate(tasks: Iterable[Task], evaluate: Evaluate, workers: int, samples: int = 3) -> Estimate:
    """Count the tasks, and compute a few of them here to know how long they take."""
    count, picked = _sampled(tasks, samples)
    evaluate_one(picked[0], evaluate)  # the first also pays for imports and reading the trace
    started = time.perf_counter()
    for task in picked:
        evaluate_one(task, evaluate)
    each_s = (time.perf_counter() - started) / len(picked)
    return Estimate(count, each_s * count / max(1, min(workers, count)))


def _sampled(tasks: Iterable[Task], samples: int) -> tuple[int, list[Task]]:
    """How many tasks there are, and an even sample of them, in one pass."""
    chosen: list[Task] = []
    count, draw = 0, random.Random(0)
    for count, task in enumerate(tasks, start=1):
        if len(chosen) < samples:
            chosen.append(task)
        elif (place := draw.randrange(count)) < samples:
            chosen[place] = task
    return count, chosen


def evaluate_one(task: Task, evaluate: Evaluate) -> Record:
    """The record of one task: its result, or the one-line reason why it has none."""
    table = resolved(task.config)
    try:
        return record_of(task, table, result=evaluate(table))
    except SpecterError as error:
        return record_of(task, table, error=str(error))


def record_of(
    task: Task, table: Table, result: dict[str, Any] | None = None, error: str | None = None
) -> Record:
    """A record of now; `table` is the task's resolved configuration."""
    record: Record = {
        "key": task.key,
        "computed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": table,
    }
    if result is None:
        return record | {"error": error}
    return record | {"result": {key: _finite(value) for key, value in result.items()}}


def default_workers() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finite(value: Any) -> Any:
    """JSON knows neither infinity nor "not a number": both are written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
