"""Computing tasks on a dask.distributed cluster.

The cluster's scheduler does what clusters need: it gives out the work, and gives it out again when
a worker dies. What travels is the name of one installed function and JSON text; see `remote`.
"""

import contextlib
import json
import logging
import re
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from specter_sim import __version__
from specter_sim.config import Table, resolved
from specter_sim.results import Engine
from specter_sim.sweep import remote
from specter_sim.sweep.engines import Tell
from specter_sim.sweep.evaluate import inputs_reader
from specter_sim.sweep.executor import Compute, record_of
from specter_sim.sweep.plan import Task
from specter_sim.sweep.pools import Records
from specter_sim.sweep.store import Record
from specter_traces.errors import SpecterError, UsageError

CONNECT_S = 5
_ADDRESS = re.compile(r"((tcp|tls)://)?[^:/\s]+:\d+")
LEAST_QUEUED = 64
QUEUED_PER_THREAD = 4


def on_cluster(address: str, asked: Engine | None, tell: Tell = lambda text: None) -> Compute:
    """Compute on the cluster whose scheduler is at `address`, like "tcp://host:8786".

    Computing raises SpecterError when there is no scheduler, when it has no worker or is lost,
    and when a worker refuses (see `remote`). A configuration that has killed several workers gets
    a record with that error.
    """

    def compute(tasks: Iterator[Task]) -> Records:
        with _connected(address) as client:
            threads = sum(client.nthreads().values())
            tell(f"{len(client.nthreads())} workers with {threads} threads at {address}")
            most = max(LEAST_QUEUED, QUEUED_PER_THREAD * threads)
            yield from _computed(client, tasks, asked or Engine.COMPILED, most)

    return compute


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    """A client; whatever it has asked for and not got is cancelled at the end."""
    try:
        from distributed import Client
    except ImportError:
        raise UsageError(
            '--cluster needs dask.distributed: pip install "specter[cluster]"'
        ) from None
    _silence()
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f'"{address}" is no scheduler: write it like tcp://host:8786')
    try:
        client = Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SpecterError(
            f"no scheduler answers at {address} ({reason}): start one with dask scheduler"
        ) from None
    try:
        _await_a_worker(client, address)
        yield client
    finally:
        with contextlib.suppress(Exception):
            client.close(timeout=CONNECT_S)


def _await_a_worker(client: Any, address: str) -> None:
    from distributed import TimeoutError as NoWorkerError

    try:
        client.wait_for_workers(1, timeout=CONNECT_S)
    except (NoWorkerError, TimeoutError):
        raise SpecterError(
            f"the scheduler at {address} has no worker: start one with dask worker {address}"
        ) from None


def _silence() -> None:
    """Its own lines about lost connections would only stand beside ours."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _computed(client: Any, tasks: Iterator[Task], engine: Engine, most: int) -> Records:
    from distributed import as_completed

    run, inputs = uuid.uuid4().hex[:8], inputs_reader()
    submitted: dict[Any, Task] = {}

    def submit(task: Task) -> Any:
        key = f"specter-{run}-{task.key}"
        future = client.submit(
            remote.compute, _order(task, inputs(task.config), engine), key=key, pure=False
        )
        submitted[future] = task
        return future

    running = as_completed(map(submit, islice(tasks, most)), loop=client.loop, raise_errors=False)
    try:
        for future in running:
            yield _record(submitted.pop(future), future)
            running.update(map(submit, islice(tasks, 1)))
    finally:
        with contextlib.suppress(Exception):
            client.cancel(list(submitted), force=True)


def _order(task: Task, inputs: str, engine: Engine) -> str:
    table = resolved(task.config)
    order = {"version": __version__, "inputs": inputs, "engine": engine.value}
    return json.dumps(order | {"config": _with_whole_paths(table)})


def _with_whole_paths(table: Table) -> Table:
    """The configuration with its files as absolute paths: a worker has another current folder."""

    def whole(name: str) -> str:
        return str(Path(name).absolute()) if Path(name).exists() else name

    return {
        **table,
        "model": whole(table["model"]),
        "trace": {**table["trace"], "path": whole(table["trace"]["path"])},
        "machine": {**table["machine"], "name": whole(table["machine"]["name"])},
    }


def _record(task: Task, future: Any) -> Record:
    table = resolved(task.config)
    if future.status == "error":
        return record_of(task, table, error=_why_killed(future.exception()))
    if future.status != "finished":
        raise SpecterError("the scheduler is gone: start it again, and the same command goes on")
    answer = json.loads(future.result())
    if "refused" in answer:
        raise SpecterError(answer["refused"])
    return record_of(task, table, **answer)


def _why_killed(error: Any) -> str:
    """The line about a configuration that kills its workers; any other error is raised."""
    from distributed.scheduler import KilledWorker

    if isinstance(error, KilledWorker):
        return "every worker that computed it died: give workers more memory, or change it"
    if isinstance(error, ModuleNotFoundError):
        raise SpecterError(
            f"a worker lacks a module ({error}): install specter {__version__} there"
        )
    raise error
