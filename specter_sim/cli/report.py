"""`specter-sim report`: the results of a sweep as one HTML page."""

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from specter_sim.cli.options import JsonOption, print_json, today
from specter_sim.config import build, load_table
from specter_sim.report.study import Speculation, Study
from specter_sim.report.validation import ValidatedPoint
from specter_sim.results import Result
from specter_sim.sweep.store import RECORDS, Record, flat_row
from specter_traces.errors import SpecterError, UsageError

TABLE = "results.json"
SWEEP_FILE = "sweep.toml"
REPORT = "report.html"
NUMBERS = tuple(field.name for field in fields(Result) if field.type in ("float", "int"))
# The others may be absent: infinity is written as null, and older results know fewer metrics.
REQUIRED = (
    "device_bytes",
    "slots_per_layer",
    "committed_tokens",
    "tokens_per_s",
    "draft_s",
    "compute_s",
    "stall_demand_s",
    "stall_late_s",
    "stall_join_s",
    "idle_s",
)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that a sweep wrote to.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help=f"The page [default: DIR/{REPORT}]."),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(help=f'What the sweep is to answer; else "question" of DIR/{SWEEP_FILE}.'),
    ] = None,
    validation: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Measured points (JSON) to hold the answer against."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one self-contained HTML page about a sweep: the answer, and what it rests on."""
    from specter_sim.report.answer import answer
    from specter_sim.report.html import write_report

    study = read_study(folder, question, validation or [])
    path = write_report(study, out or folder / REPORT)
    told = answer(study)
    if as_json:
        best = study.best and study.best["key"]
        print_json({"date": study.date, "file": str(path), "best": best, "answer": told})
        return
    typer.echo(f"{told}\nwrote {path}")


def read_study(folder: Path, question: str | None = None, validation: Sequence[Path] = ()) -> Study:
    """Everything the page is made from. Raises UsageError for a folder that has no results."""
    from specter_sim import __version__

    records, remarks = read_records(folder)
    results = [record for record in records if "result" in record]
    failures = [str(record["error"]) for record in records if "result" not in record]
    if not results:
        raise SpecterError(f"none of {len(records)} configurations could run: {failures[0]}")
    rows = [checked_row(record, folder) for record in results]
    return Study(
        rows=rows,
        date=today(),
        version=__version__,
        speculation=_speculation(rows, results),
        question=question or _question(folder),
        failures=failures,
        points=_points(validation),
        remarks=remarks,
    )


def read_records(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of the last sweep that finished in a folder, and what to say about them.

    Without such a sweep, all results the folder has. Raises UsageError when there is none.
    """
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}: give the folder that specter-sim sweep wrote to")
    finished, appended = folder / TABLE, folder / RECORDS
    if finished.is_file():
        return _of_table(finished), []
    if not appended.is_file():
        raise UsageError(
            f"{folder} holds no results of a sweep: run specter-sim sweep --out {folder} first"
        )
    found = _of_lines(appended)
    if not found:
        raise UsageError(f"{appended} holds no result yet: let the sweep run first")
    return found, [f"The sweep has not finished: {len(found)} results so far."]


def checked_row(record: Record, folder: Path) -> dict[str, Any]:
    """The flat row of a record. Raises UsageError when it lacks what a row needs."""
    row = flat_row(record)
    for name in NUMBERS:
        value = row.get(name)
        if not _is_number(value) and (value is not None or name in REQUIRED):
            raise UsageError(
                f"{folder}: result {record['key']} has {name} = {value!r}, which is no "
                "number: run the sweep again"
            )
    return row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _of_table(path: Path) -> list[Record]:
    try:
        records = [_checked(record) for record in json.loads(_read(path))["results"]]
        if records:
            return records
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UsageError(f"{path} is not a sweep's table: run the sweep again")


def _of_lines(path: Path) -> list[Record]:
    """The last result of each configuration; a torn last line is left out."""
    whole, _, _ = _read(path).rpartition("\n")
    latest: dict[str, Record] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = _checked(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UsageError(f"{path} line {number} is not a result: take the line out") from None
        latest[json.dumps(record["config"], sort_keys=True)] = record
    return list(latest.values())


def _checked(record: Any) -> Record:
    if not (isinstance(record["key"], str) and isinstance(record["config"], dict)):
        raise TypeError
    if not isinstance(record.get("result", {}), dict) or not {"result", "error"} & set(record):
        raise TypeError
    checked: Record = record
    return checked


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: run the sweep again") from None


def _question(folder: Path) -> str | None:
    """The question of the sweep file that was kept beside the results, if it asks one."""
    path = folder / SWEEP_FILE
    asked = load_table(path).get("question") if path.is_file() else None
    return str(asked) if asked else None


def _points(paths: Sequence[Path]) -> list[ValidatedPoint]:
    from specter_sim.report.validation import packaged_points, read_points

    return [*packaged_points(), *(point for path in paths for point in read_points(path))]


def _speculation(rows: Sequence[dict[str, Any]], records: Sequence[Record]) -> Speculation:
    """Whether drafting pays for the best row: against its twin, else among the rows.

    The twin is simulated here; its trace or machine file need not be on this machine any more.
    """
    from specter_sim.cli.run import speculation_of
    from specter_sim.report.answer import speculation_from_rows
    from specter_sim.report.rows import best_by

    best = best_by(rows)
    if best is None:
        return Speculation(None, None, "no verdict on speculation: no configuration can be used")
    config = next(record["config"] for record in records if record["key"] == best["key"])
    try:
        found = Speculation(**speculation_of(build(config), best))
    except SpecterError as error:
        found = Speculation(None, None, f"no verdict on speculation: {error}")
    if found.pays is None:
        return speculation_from_rows(rows) or found
    return found
