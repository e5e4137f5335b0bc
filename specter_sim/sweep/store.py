"""The results of a sweep on disk: appended line by line as they come, so that nothing is ever lost.

`results.jsonl` is the record: one line a result, written in one call, so only the last line can be
torn by a kill; a torn last line is cut off when the folder is opened again. The tables
(`results.csv`, `results.json`, Parquet) are made from it at the end.
"""

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from specter_sim.config import flatten
from specter_traces.errors import SpecterError, UsageError
from specter_traces.files import write_atomic

Record = dict[str, Any]
RECORDS = "results.jsonl"


class Store:
    """The results in one folder, open for one writer at a time.

    A record is `{"key", "config", "result", ...}`, or `{"key", "config", "error"}` for a
    configuration that could not run: those are tried again by the next sweep.
    """

    def __init__(self, folder: Path) -> None:
        """Open or make the folder. Raises UsageError when it cannot be written or is in use."""
        self.folder = folder
        self.path = folder / RECORDS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"cannot write to {folder}: {reason}; give another folder with --out"
            ) from None
        _lock(self._file, folder)
        try:
            self._records = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()

    def result(self, key: str) -> Record | None:
        """The record of a configuration that has been computed, else None."""
        record = self._records.get(key)
        return record if record is not None and "result" in record else None

    def append(self, record: Record) -> None:
        """Add a record. It is in the file when this returns."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise SpecterError(f"cannot write to {self.path}: {error.strerror}") from None
        if written != len(line):
            raise SpecterError(f"cannot write to {self.path}: the disk is full")
        self._records[record["key"]] = record

    def _read(self) -> dict[str, Record]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            # A kill tore the last line: cut it off, or the next record would be glued to it.
            self._file.truncate(whole)
        records: dict[str, Record] = {}
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            record = self._parse(line, number)
            if "result" in record or record["key"] not in records:
                records[record["key"]] = record
        return records

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            record: Record = json.loads(line)
            if isinstance(record["key"], str) and ("result" in record or "error" in record):
                return record
        except (ValueError, KeyError, TypeError):
            pass
        raise UsageError(
            f"{self.path} line {number} is not a result: move the file away or take the line out"
        )


def flat_row(record: Record) -> dict[str, Any]:
    """One row of the tables: identity, the resolved configuration in dotted keys, the result."""
    row = {key: value for key, value in record.items() if key not in ("config", "result")}
    result: Record = record.get("result", {})
    return row | flatten(record["config"]) | result


def write_tables(folder: Path, records: Sequence[Record], about: Mapping[str, Any]) -> list[Path]:
    """Write `results.csv`, `results.json` and, when pyarrow is there, `results.parquet`."""
    rows = [flat_row(record) for record in records]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    document = json.dumps({**about, "results": list(records)}, indent=1)
    written = [
        write_atomic(folder / "results.csv", _as_csv(rows, columns)),
        write_atomic(folder / "results.json", document + "\n"),
    ]
    return written + _write_parquet(folder / "results.parquet", rows, columns)


def _as_csv(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _write_parquet(
    path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> list[Path]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in columns})
    return [write_atomic(path, lambda file: pq.write_table(table, file))]


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: a column that mixes texts and numbers (or lists) is written as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) <= 1 and not kinds & {list, dict}):
        return values
    return [None if value is None else str(_cell(value)) for value in values]


def _lock(file: BinaryIO, folder: Path) -> None:
    """Refuse a second writer. The lock goes with the process, however it ends."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UsageError(
            f"another sweep is writing to {folder}: wait for it or give another folder with --out"
        ) from None
