"""Rows by column: what goes in comes out, of the same type, in little memory."""

import sys
from array import array
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specter_sim.sweep.columns import Columns

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
)
ROWS = st.lists(st.dictionaries(st.sampled_from("abcd"), VALUES), max_size=12)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(ROWS)
@example([{"a": 1}, {"a": True}, {"a": 1.0}])
def test_rows_come_out_as_they_went_in(rows: list[dict[str, Any]]) -> None:
    columns = Columns(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    expected = [{name: row.get(name) for name in names} for row in rows]
    assert len(columns) == len(rows)
    assert [dict(row) for row in columns] == expected
    for row, told in zip(columns, expected, strict=True):
        assert list(map(type, row.values())) == list(map(type, told.values()))
        assert (len(row), row.get("absent")) == (len(names), None)
    assert [dict(row) for row in columns[1:]] == expected[1:]


def test_numbers_take_eight_bytes_and_constants_nothing() -> None:
    rows = ({"same": "x" * 40, "number": index / 7, "count": index} for index in range(1000))
    columns = Columns(rows).columns
    assert columns["same"]._values is None
    for name in ("number", "count"):
        values = columns[name]._values
        assert isinstance(values, array) and sys.getsizeof(values) < 10_000


def test_equal_texts_are_kept_once() -> None:
    rows = [{"policy": "".join(["l", "ru"]) if index % 2 else "fifo"} for index in range(10)]
    assert len({id(row["policy"]) for row in Columns(rows)}) == 2
