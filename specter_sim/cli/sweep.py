"""`specter-sim sweep`: many configurations, resumably; a table, plots and a file that runs."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any

import typer

from specter_sim.cli.app import INTERRUPTED
from specter_sim.cli.options import (
    JsonOption,
    OutOption,
    SetOption,
    WorkersOption,
    print_json,
    today,
)
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
from specter_sim.sweep.executor import Outcome, Progress, default_workers, estimate_s, run_tasks
from specter_sim.sweep.plan import Sweep, Task, make_tasks, read_sweep
from specter_sim.sweep.store import Record, Store, flat_row, write_tables
from specter_sim.units import format_duration
from specter_traces.errors import SpecterError
from specter_traces.files import write_atomic

DEFAULT_SWEEP = "default_sweep.toml"
BEST = "best.toml"
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
    top: Annotated[int, typer.Option(min=1, help="Rows of the printed table.")] = 20,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the figures.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Simulate many configurations. A rerun computes only what is missing."""
    planned = _read(file, settings or [], axes or [])
    tasks = _tasks(planned)
    count = workers or default_workers()
    folder = out or Path("results") / (file.stem if file else "default")
    if dry_run:
        _print_estimate(planned, tasks, count, as_json)
        return
    outcome = _computed(tasks, folder, count)
    written = _write(outcome, folder, plots)
    speculation = _speculation(outcome, tasks)
    if as_json:
        print_json(_document(outcome, written, speculation))
        return
    _print(outcome, top)
    typer.echo(f"\n{speculation['text']}\n")
    for path in written:
        typer.echo(f"wrote {path}")
    if folder / BEST in written:
        typer.echo(f"run the best one with: specter-sim run {folder / BEST}")


def _read(file: Path | None, settings: Sequence[str], axes: Sequence[str]) -> Sweep:
    if file is not None:
        return read_sweep(file, settings, axes)
    with as_file(files("specter_sim") / "data" / DEFAULT_SWEEP) as path:
        return read_sweep(path, settings, axes)


def _tasks(planned: Sweep) -> list[Task]:
    from specter_sim import __version__
    from specter_sim.sweep.evaluate import inputs_of

    return make_tasks(planned, inputs_of, __version__)


def _print_estimate(planned: Sweep, tasks: Sequence[Task], workers: int, as_json: bool) -> None:
    from specter_sim.sweep.evaluate import evaluate

    seconds = estimate_s(tasks, evaluate, workers)
    if as_json:
        axes = list(planned.axes.keys)
        print_json({"configurations": len(tasks), "estimate_s": seconds, "axes": axes})
        return
    typer.echo(f"{len(tasks)} configurations over {', '.join(planned.axes.keys)}")
    told = format_duration(seconds)
    typer.echo(f"about {told} with {workers} workers, if nothing has been computed yet")


def _computed(tasks: Sequence[Task], folder: Path, workers: int) -> Outcome:
    from specter_sim.sweep.evaluate import evaluate

    try:
        with Store(folder) as store, progress_bar() as progress:
            outcome = run_tasks(tasks, evaluate, store, workers, progress)
    except KeyboardInterrupt:
        told = f"interrupted; what was computed is in {folder}: the same command goes on there"
        print(f"error: {told}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if not outcome.results:
        first = outcome.failures[0]["error"]
        raise SpecterError(f"none of {len(tasks)} configurations could run: {first}")
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


def _write(outcome: Outcome, folder: Path, plots: bool) -> list[Path]:
    from specter_sim import __version__
    from specter_sim.config import build, to_toml

    about = {"date": today(), "version": __version__}
    written = write_tables(folder, outcome.records, about)
    best = best_by(_rows(outcome))
    if best is not None:  # else all are bounds, or need more memory than there is
        table = next(record["config"] for record in outcome.results if record["key"] == best["key"])
        written.append(write_atomic(folder / BEST, to_toml(build(table))))
    if plots:
        from specter_sim.report.plots import draw_all

        written += draw_all(_rows(outcome), folder, today())
    return written


def _rows(outcome: Outcome) -> list[Row]:
    return [flat_row(record) for record in outcome.results]


def _speculation(outcome: Outcome, tasks: Sequence[Task]) -> dict[str, Any]:
    """The verdict for the best configuration, against its twin at equal memory."""
    from specter_sim.cli.run import speculation_of

    best = best_by(_rows(outcome))
    if best is None:
        return {
            "pays": None,
            "speedup": None,
            "text": "no verdict on speculation: no configuration can be used",
        }
    config = next(task.config for task in tasks if task.key == best["key"])
    verdict = speculation_of(config, best)
    return verdict | {"text": f"best configuration: {verdict['text']}"}


def _print(outcome: Outcome, top: int) -> None:
    from specter_sim.report.rows import conditions
    from specter_sim.report.tables import Cell, marks, results_table

    every = _rows(outcome)
    rows = [row for row in every if fits(row)] or every
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
    if len(rows) < len(every):
        typer.echo(
            f"note: {len(every) - len(rows)} need more memory than the device has: not shown"
        )
    _print_counts(outcome)


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


def _print_counts(outcome: Outcome) -> None:
    total = len(outcome.records)
    told = f"{total} configurations: {outcome.computed} computed, {outcome.reused} reused"
    failures = outcome.failures
    if failures:
        told += f"; {len(failures)} could not run, the first because {failures[0]['error']}"
    typer.echo(f"\n{told}")


def _document(
    outcome: Outcome, written: Sequence[Path], speculation: dict[str, Any]
) -> dict[str, Any]:
    best = best_by(_rows(outcome))
    records: list[Record] = outcome.records
    return {
        "date": today(),
        "computed": outcome.computed,
        "reused": outcome.reused,
        "failed": len(outcome.failures),
        "best": best and best["key"],
        "speculation": speculation,
        "files": [str(path) for path in written],
        "results": records,
    }
