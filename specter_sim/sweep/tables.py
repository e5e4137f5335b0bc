"""The tables of a sweep: `results.csv`, `results.json` and, with pyarrow, `results.parquet`."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from specter_sim.sweep.columns import Column, Columns
from specter_sim.sweep.store import Store, flat_row
from specter_traces.files import write_atomic


def read_rows(store: Store, keys: Iterable[str]) -> Columns:
    """The flat rows of the records with these keys, in their order."""
    return Columns(map(flat_row, store.records(keys)))


def write_tables(
    store: Store, keys: Iterable[str], rows: Columns, about: Mapping[str, Any]
) -> list[Path]:
    """Write the tables of these records, and of the rows read from them, to the store's folder."""
    folder = store.folder
    document = json_document(about, store.lines(keys))
    written = [
        write_atomic(folder / "results.csv", lambda file: _write_csv(file, rows)),
        write_atomic(folder / "results.json", lambda file: _write_text(file, document)),
    ]
    return written + _write_parquet(folder / "results.parquet", rows)


def json_document(about: Mapping[str, Any], lines: Iterable[str]) -> Iterator[str]:
    """The pieces of one JSON document: what it is about, and its "results" from lines of JSON."""
    head = f"{json.dumps(about, indent=1)[:-2]}," if about else "{"
    yield f'{head}\n "results": ['
    separator = "\n"
    for line in lines:
        yield f"{separator}  {line}"
        separator = ",\n"
    yield "\n ]\n}\n"


def _write_text(file: BinaryIO, pieces: Iterable[str]) -> None:
    for piece in pieces:
        file.write(piece.encode())


def _write_csv(file: BinaryIO, rows: Columns) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows.columns)
    columns = list(rows.columns.values())
    for index in range(len(rows)):
        writer.writerow([_cell(column[index]) for column in columns])
    text.detach()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _write_parquet(path: Path, rows: Columns) -> list[Path]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    table = pa.table({name: pa.array(_alike(column)) for name, column in rows.columns.items()})
    return [write_atomic(path, lambda file: pq.write_table(table, file))]


def _alike(column: Column) -> list[Any]:
    """Values of one type: a column that mixes texts and numbers (or lists) is written as text."""
    values = [column[index] for index in range(len(column))]
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) <= 1 and not kinds & {list, dict}):
        return values
    return [None if value is None else str(_cell(value)) for value in values]
