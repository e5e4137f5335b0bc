"""Computing tasks on this machine: one after the other, in threads, or in processes.

Threads share traces and everything derived from them; they pay where the work releases the GIL,
as the compiled engine does. Processes are for plain Python, the SimPy engine. They are started
afresh ("spawn"), so what they call must be importable; no state is shared and no lock is inherited.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import TypeVar

from specter_sim.sweep.evaluate import NeedsSimpyError
from specter_sim.sweep.executor import Compute, Evaluate, evaluate_one
from specter_sim.sweep.plan import Task
from specter_sim.sweep.store import Record
from specter_traces.errors import SpecterError

R = TypeVar("R")
Records = Generator[Record, None, None]

# Two tasks a worker keep it busy while the parent writes, and bound what an interrupt throws away.
QUEUED_PER_WORKER = 2


def one_by_one(evaluate: Evaluate) -> Compute:
    """Compute in this thread."""

    def compute(tasks: Iterator[Task]) -> Records:
        for task in tasks:
            yield evaluate_one(task, evaluate)

    return compute


def in_threads(evaluate: Evaluate, workers: int, others: Compute) -> Compute:
    """Compute in threads; the tasks that raise NeedsSimpyError are left to `others` at the end."""

    def compute(tasks: Iterator[Task]) -> Records:
        left: list[Task] = []

        def work(task: Task) -> Record | None:
            try:
                return evaluate_one(task, evaluate)
            except NeedsSimpyError:
                left.append(task)
                return None

        with ThreadPoolExecutor(workers) as pool:
            found = _submitted(pool, work, tasks, QUEUED_PER_WORKER * workers)
            try:
                yield from (record for record in found if record is not None)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        yield from others(iter(left))

    return compute


def in_processes(evaluate: Evaluate, workers: int) -> Compute:
    """Compute in processes; a single task, or a single worker, does not need one."""

    def compute(tasks: Iterator[Task]) -> Records:
        first = list(islice(tasks, 2))
        every = chain(first, tasks)
        if workers == 1 or len(first) < 2:
            return one_by_one(evaluate)(every)
        return _spread_over_processes(every, evaluate, workers)

    return compute


def _spread_over_processes(tasks: Iterator[Task], evaluate: Evaluate, workers: int) -> Records:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _prepare_worker)
    try:
        yield from _submitted(pool, evaluate_one, tasks, QUEUED_PER_WORKER * workers, evaluate)
    except BrokenProcessPool:
        raise SpecterError(
            "a worker process died (out of memory?): rerun to go on, perhaps with fewer --workers"
        ) from None
    except BaseException:
        _end(pool)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submitted(
    pool: Executor, work: Callable[..., R], tasks: Iterator[Task], most: int, *arguments: object
) -> Iterator[R]:
    """The answers as they come, with at most so many tasks submitted at once."""
    running: set[Future[R]] = set()
    while True:
        for task in islice(tasks, most - len(running)):
            running.add(pool.submit(work, task, *arguments))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


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
