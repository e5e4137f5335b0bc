"""`specter-sim sweep`: many configurations, resumably; a table, plots and a file that runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

from specter_sim.cli.app import INTERRUPTED
from specter_sim.cli.options import (
    EngineOption,
    JsonOption,
    OutOption,
    SetOption,
    WorkersOption,
    print_json,
    tell,
    today,
)
from specter_sim.config import RunConfig
from specter_sim.report.rows import (
    SLOT_KEYS,
    Row,
    best_by,
    fits,
    panel_keys,
    panels,
    policy_label,
    short_name,
    value_text,
    varying,
)
from specter_sim.results import Engine
from specter_sim.sweep.executor import (
    Compute,
    Outcome,
    Progress,
    default_workers,
    estimate,
    run_tasks,
)
from specter_sim.sweep.plan import Sweep, Task, make_tasks, read_sweep
from specter_sim.sweep.store import Store
from specter_sim.sweep.tables import json_document, read_rows, write_tables
from specter_sim.units import format_duration
from specter_traces.errors import SpecterError, UsageError
from specter_traces.files import write_atomic

DEFAULT_SWEEP = "default_sweep.toml"
BEST = "best.toml"
KEPT = "sweep.toml"
MOST_PLACES = 6


def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[SWEEP.toml]", help="Sweep file; default: one that is built in."),
    ] = None,
    settings: SetOption = None,
    axes: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="KEY=LIST", help="Give an axis: --axis memory.slots=[8,12]"),
    ] = None,
    out: OutOption = None,
    workers: WorkersOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the count and an estimate; compute nothing.")
    ] = False,
    engine: EngineOption = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Compute on a dask.distributed cluster: tcp://host:8786."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the printed table.")] = 20,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the figures.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Simulate many configurations. A rerun computes only what is missing."""
    planned = _read(file, settings or [], axes or [])
    count = workers or default_workers()
    folder = out or Path("results") / (file.stem if file else "default")
    if dry_run:
        _print_estimate(planned, count, engine, as_json)
        return
    if cluster is not None and workers is not None:
        raise UsageError("--workers counts this machine's: a cluster has its own")
    compute = _compute(count, engine, cluster)
    with Store(folder) as store:
        outcome = _computed(planned, compute, store)
        written = [_keep(file, settings or [], axes or [], folder)]
        done = _finished(outcome, store, engine, plots, written)
        if as_json:
            _print_document(done, store)
            return
    _print(done, top)
    typer.echo(f"\n{done.speculation['text']}\n")
    for path in done.written:
        typer.echo(f"wrote {path}")
    if folder / BEST in done.written:
        typer.echo(f"run the best one with: specter-sim run {folder / BEST}")


@dataclass(frozen=True)
class Finished:
    """A sweep that has been computed and written."""

    outcome: Outcome
    rows: Sequence[Row]
    best: Row | None
    speculation: dict[str, Any]
    written: list[Path]


def _read(file: Path | None, settings: Sequence[str], axes: Sequence[str]) -> Sweep:
    if file is not None:
        return read_sweep(file, settings, axes)
    with as_file(files("specter_sim") / "data" / DEFAULT_SWEEP) as path:
        return read_sweep(path, settings, axes)


def _tasks(planned: Sweep) -> Iterator[Task]:
    from specter_sim import __version__
    from specter_sim.sweep.evaluate import inputs_reader

    return make_tasks(planned, inputs_reader(), __version__)


def _print_estimate(planned: Sweep, workers: int, engine: Engine | None, as_json: bool) -> None:
    from specter_sim.sweep.engines import engine_for
    from specter_sim.sweep.evaluate import evaluate

    chosen = engine_for((), engine)
    found = estimate(_tasks(planned), partial(evaluate, engine=chosen), workers)
    if as_json:
        axes = list(planned.axes.keys)
        counted = {"configurations": found.configurations, "estimate_s": found.seconds}
        print_json(counted | {"engine": chosen, "axes": axes})
        return
    typer.echo(f"{found.configurations} configurations over {', '.join(planned.axes.keys)}")
    told = format_duration(found.seconds)
    typer.echo(
        f"about {told} with {workers} workers on the {chosen} engine, if nothing has been "
        "computed yet"
    )


def _compute(workers: int, engine: Engine | None, cluster: str | None) -> Compute:
    if cluster is not None:
        from specter_sim.sweep.cluster import on_cluster

        return on_cluster(cluster, engine, tell)
    from specter_sim.sweep.engines import local

    return local(workers, engine, tell)


def _computed(planned: Sweep, compute: Compute, store: Store) -> Outcome:
    try:
        with progress_bar() as progress:
            outcome = run_tasks(_tasks(planned), compute, store, progress, planned.most)
    except KeyboardInterrupt:
        told = f"interrupted; what was computed is in {store.folder}"
        print(f"error: {told}: the same command goes on there", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if not outcome.has_results:
        count = len(outcome.keys)
        raise SpecterError(f"none of {count} configurations could run: {outcome.first_error}")
    return outcome


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar with an ETA on stderr while a sweep computes; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("configurations"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _keep(file: Path | None, settings: Sequence[str], axes: Sequence[str], folder: Path) -> Path:
    """Keep the sweep file beside its results, with what the command line changed."""
    source = file or files("specter_sim") / "data" / DEFAULT_SWEEP
    changes = [f"# changed by --set {text}\n" for text in settings]
    changes += [f"# changed by --axis {text}\n" for text in axes]
    text = source.read_text(encoding="utf-8")
    return write_atomic(folder / KEPT, "".join(changes) + text)


def _finished(
    outcome: Outcome, store: Store, engine: Engine | None, plots: bool, written: list[Path]
) -> Finished:
    """Write tables, the best configuration and the figures."""
    from specter_sim import __version__
    from specter_sim.config import build, to_toml

    every = read_rows(store, outcome.keys)
    about = {"date": today(), "version": __version__}
    written = [*written, *write_tables(store, outcome.keys, every, about)]
    rows = [row for row in every if row.get("error") is None]
    best = best_by(rows)
    speculation = _no_best()
    if best is not None:  # else all are bounds, or need more memory than there is
        (record,) = store.records([best["key"]])
        config = build(record["config"])
        written.append(write_atomic(store.folder / BEST, to_toml(config)))
        speculation = _speculation(config, best, engine)
    if plots:
        from specter_sim.report.plots import draw_all

        written += draw_all(rows, store.folder, today())
    return Finished(outcome, rows, best, speculation, written)


def _no_best() -> dict[str, Any]:
    told = "no verdict on speculation: no configuration can be used"
    return {"pays": None, "speedup": None, "text": told}


def _speculation(config: RunConfig, best: Row, engine: Engine | None) -> dict[str, Any]:
    """The verdict for the best configuration, against its twin at equal memory."""
    from specter_sim.cli.run import speculation_of

    verdict = speculation_of(config, best, engine)
    return verdict | {"text": f"best configuration: {verdict['text']}"}


def _print(done: Finished, top: int) -> None:
    from specter_sim.report.rows import conditions
    from specter_sim.report.tables import Cell, marks, results_table

    rows: Sequence[Row] = [row for row in done.rows if fits(row)] or done.rows
    keys = varying(rows)
    places = panel_keys(rows)
    labels: dict[str, Cell] = {short_name(key): _told(key) for key in places}
    labels |= {key.rpartition(".")[2]: _told(key) for key in SLOT_KEYS if key in keys}
    labels["policy"] = lambda row: policy_label(row, keys)
    shown, title = _leading(rows, top)
    typer.echo(f"{conditions(rows, today())}\n{title}\n")
    typer.echo(results_table(shown, labels))
    for mark in dict.fromkeys(mark for row in rows for mark in marks(row)):
        typer.echo(f"note: {mark}")
    if len(rows) < len(done.rows):
        left_out = len(done.rows) - len(rows)
        typer.echo(f"note: {left_out} need more memory than the device has: not shown")
    _print_counts(done)


def _told(key: str) -> Any:
    return lambda row: value_text(key, row.get(key))


def _leading(rows: Sequence[Row], top: int) -> tuple[list[Row], str]:
    """The fastest rows; where there are several places, the fastest of each."""
    groups = panels(rows, MOST_PLACES)
    each = max(1, top // len(groups))
    ranked = [sorted(group, key=_tpot)[:each] for _, group in groups]
    shown = [row for group in ranked for row in group]
    if len(shown) == len(rows):
        return shown, f"all {len(rows)}, the fastest first"
    of = "" if len(groups) == 1 else f" in each of {len(groups)} places,"
    return shown, f"the {each} fastest{of} of {len(rows)}"


def _tpot(row: Row) -> float:
    return float("inf") if row["tpot_s"] is None else float(row["tpot_s"])


def _print_counts(done: Finished) -> None:
    outcome = done.outcome
    total = len(outcome.keys)
    told = f"{total} configurations: {outcome.computed} computed, {outcome.reused} reused"
    if outcome.failed:
        told += f"; {outcome.failed} could not run, the first because {outcome.first_error}"
    typer.echo(f"\n{told}")
    noted = sum(row.get("engine") == Engine.SIMPY for row in done.rows)
    if noted:
        typer.echo(f"{noted} of them by the SimPy engine")


def _print_document(done: Finished, store: Store) -> None:
    """One JSON document, written piece by piece: it may be large."""
    outcome = done.outcome
    about = {
        "date": today(),
        "computed": outcome.computed,
        "reused": outcome.reused,
        "failed": outcome.failed,
        "best": done.best and done.best["key"],
        "speculation": done.speculation,
        "files": [str(path) for path in done.written],
    }
    for piece in json_document(about, store.lines(outcome.keys)):
        typer.echo(piece, nl=False)
