"""Rows of `specter-run bench`: a CSV file that grows row by row and knows what it has."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from specter_sim.results import Result
from specter_traces.errors import UsageError
from specter_traces.files import write_atomic

Value = str | int | float | bool | None

KEY = "key"
_ABOUT = (
    KEY,
    "date",
    "policy",
    "model",
    "device",
    "link_bytes_per_s",
    "budget_bytes",
    "peak_device_bytes",
    "prompts",
    "sequences",
    "new_tokens",
    "sampling",
    "threads",
    "repetition",
    "stall_share",
    "predicted_tpot_s",
    "predicted_fast_tpot_s",
    "predicted_slow_tpot_s",
    "predicted_bytes_per_token",
    "error",
)
COLUMNS = (*_ABOUT, *(field.name for field in fields(Result)))
"""Columns of the file; those of a result as `Result` defines them."""


class Rows:
    """All rows, in a file too if there is one; every new row is in the file at once."""

    def __init__(self, path: Path | None) -> None:
        """Take up a file of earlier rows. UsageError when it is no such file."""
        self._path = path
        self._rows = [] if path is None or not path.exists() else _read(path)

    def find(self, key: str) -> Mapping[str, Value] | None:
        """The finished row of that key; one that failed is to be tried again."""
        found = (row for row in self._rows if row[KEY] == key and not row["error"])
        return next(found, None)

    def add(self, row: Mapping[str, Value]) -> Mapping[str, Value]:
        """Add a row, in place of an earlier one of its key; returns it with all columns."""
        whole = {name: row.get(name) for name in COLUMNS}
        self._rows = [other for other in self._rows if other[KEY] != row[KEY]]
        self._rows.append(whole)
        if self._path is not None:
            write_atomic(self._path, _text(self._rows))
        return whole


def _text(rows: Sequence[Mapping[str, Value]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _read(path: Path) -> list[dict[str, Value]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns, rows = tuple(reader.fieldnames or ()), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if columns != COLUMNS:
        raise UsageError(f"{path} is no table of this bench: give --out another name")
    return [{name: _value(text) for name, text in row.items()} for row in rows]


def _value(text: str | None) -> Value:
    if text is None or text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
