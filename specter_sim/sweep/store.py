"""The results of a sweep on disk: appended line by line as they come, so that nothing is ever lost.

`results.jsonl` is the record: one line a result, written in one call, so only the last line can be
torn by a kill; a torn last line is cut off when the folder is opened again. In memory there is
only where each line begins.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from specter_sim.config import flatten
from specter_traces.errors import SpecterError, UsageError

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
            self._lines: BinaryIO = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(
                f"cannot write to {folder}: {reason}; give another folder with --out"
            ) from None
        self._begins: dict[str, int] = {}  # where the record of a key begins
        self._results: set[str] = set()  # keys whose record is a result
        self._end = 0
        try:
            _lock(self._file, folder)
            self._find_lines()
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._close()

    def has_result(self, key: str) -> bool:
        """Whether a configuration has been computed."""
        return key in self._results

    def result(self, key: str) -> Record | None:
        """The record of a configuration that has been computed, else None."""
        return next(self.records([key])) if self.has_result(key) else None

    def lines(self, keys: Iterable[str]) -> Iterator[str]:
        """The JSON of the records with these keys, in their order; keys without one are left out.

        Read from the file one after the other: memory does not grow with their number.
        """
        for key in keys:
            if key in self._begins:
                self._lines.seek(self._begins[key])
                yield self._lines.readline().decode().rstrip("\n")

    def records(self, keys: Iterable[str]) -> Iterator[Record]:
        """The records with these keys, read as ``lines`` are."""
        return map(json.loads, self.lines(keys))

    def append(self, record: Record) -> None:
        """Add a record. It is in the file when this returns."""
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise SpecterError(f"cannot write to {self.path}: {error.strerror}") from None
        if written != len(line):
            raise SpecterError(f"cannot write to {self.path}: the disk is full")
        self._note(record, self._end)
        self._end += len(line)

    def _note(self, record: Record, begin: int) -> None:
        """Remember where a record is; an error never hides a result."""
        key = record["key"]
        if "result" in record:
            self._results.add(key)
        elif key in self._results:
            return
        self._begins[key] = begin

    def _find_lines(self) -> None:
        for number, line in enumerate(self._lines, start=1):
            if not line.endswith(b"\n"):
                # A kill tore the last line: cut it off, or the next record would be glued to it.
                self._file.truncate(self._end)
                return
            self._note(self._parse(line, number), self._end)
            self._end += len(line)

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

    def _close(self) -> None:
        self._file.close()
        self._lines.close()


def flat_row(record: Record) -> dict[str, Any]:
    """One row of the tables: identity, the resolved configuration in dotted keys, the result."""
    row = {key: value for key, value in record.items() if key not in ("config", "result")}
    result: Record = record.get("result", {})
    return row | flatten(record["config"]) | result


def _lock(file: BinaryIO, folder: Path) -> None:
    """Refuse a second writer. The lock goes with the process, however it ends."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(
            f"another sweep is writing to {folder}: wait for it or give another folder with --out"
        ) from None
