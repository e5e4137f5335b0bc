"""Many rows in little memory: by column, a number in 8 bytes, what never changes only once.

A hundred thousand results would be gigabytes as dictionaries. Rows are handed out as read-only
mappings into the columns.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

_LARGEST = 2**63 - 1


class Column:
    """The values of one column, None where a row has none."""

    def __init__(self, count: int) -> None:
        """A column that `count` earlier rows had no value of."""
        self._count = count
        self._same: Any = None  # what every row has, until one differs
        self._values: list[Any] | array[Any] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._same if self._values is None else self._values[index]

    def append(self, value: Any) -> None:
        """The value of the next row."""
        if self._values is None and not self._starts_with(value):
            self._values = self._spread(value)
        if self._values is not None:
            if isinstance(self._values, array) and self._values.typecode != _code(value):
                self._values = list(self._values)
            self._values.append(value)
        self._count += 1

    def _starts_with(self, value: Any) -> bool:
        if self._count == 0:
            self._same = value
        return type(value) is type(self._same) and bool(value == self._same)

    def _spread(self, value: Any) -> "list[Any] | array[Any]":
        code = _code(value)
        if code and code == _code(self._same):
            return array(code, [self._same]) * self._count
        return [self._same] * self._count


def _code(value: Any) -> str:
    """The array type that holds a value exactly, "" when there is none."""
    if type(value) is float:
        return "d"
    return "q" if type(value) is int and abs(value) <= _LARGEST else ""


class Columns(Sequence[Mapping[str, Any]]):
    """Rows stored by column."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.columns: dict[str, Column] = {}
        self._count = 0
        self._texts: dict[str, str] = {}
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; columns it lacks get None."""
        for name, value in row.items():
            if name not in self.columns:
                self.columns[name] = Column(self._count)
            # Equal texts are kept once.
            kept = self._texts.setdefault(value, value) if isinstance(value, str) else value
            self.columns[name].append(kept)
        self._count += 1
        for column in self.columns.values():
            if len(column) < self._count:
                column.append(None)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> "RowOfColumns": ...
    @overload
    def __getitem__(self, index: slice) -> "list[Mapping[str, Any]]": ...
    def __getitem__(self, index: int | slice) -> "RowOfColumns | list[Mapping[str, Any]]":
        if isinstance(index, slice):
            return [RowOfColumns(self, at) for at in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return RowOfColumns(self, index % self._count)


class RowOfColumns(Mapping[str, Any]):
    """One row: a read-only mapping of every column's name to its value."""

    __slots__ = ("_index", "_table")

    def __init__(self, table: Columns, index: int) -> None:
        self._table, self._index = table, index

    def __getitem__(self, name: str) -> Any:
        return self._table.columns[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.columns)

    def __len__(self) -> int:
        return len(self._table.columns)
