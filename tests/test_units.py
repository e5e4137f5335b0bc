"""Quantities are read and written as people do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_sim.units import (
    BYTE_UNITS,
    format_bytes,
    format_duration,
    format_rate,
    format_time,
    parse_bytes,
    parse_quantity,
    parse_rate,
    parse_time,
)
from specter_traces.errors import UsageError


def test_gb_is_decimal_and_gib_is_binary() -> None:
    assert parse_bytes("24 GB") == 24 * 10**9
    assert parse_bytes("24GiB") == 24 * 2**30
    assert parse_bytes("1_000") == parse_bytes(1000) == 1000


def test_rates_and_times() -> None:
    assert parse_rate("25 GB/s") == 25e9
    assert parse_rate("1.5e3 MB/s") == 1.5e9
    assert parse_time("3.2 ms") == pytest.approx(0.0032)
    assert parse_time("7 µs") == parse_time("7 us") == pytest.approx(7e-6)
    assert parse_time(0.5) == 0.5


def test_a_quantity_of_any_kind() -> None:
    assert parse_quantity("2 GiB") == 2**31
    assert parse_quantity("2 GB/s") == 2e9
    assert parse_quantity("2 ms") == pytest.approx(2e-3)
    assert parse_quantity("2") == 2


@pytest.mark.parametrize(
    ("parse", "value", "says"),
    [
        (parse_bytes, "24 gb", 'unknown unit "gb" in "24 gb": did you mean "GB"?'),
        (parse_bytes, "25 GB/s", 'unknown unit "GB/s"'),
        (parse_rate, "25 GB", 'did you mean "GB/s"?'),
        (parse_time, "fast", 'write it like "3.2 ms"'),
        (parse_bytes, "-1 GB", "not negative"),
        (parse_time, float("nan"), "finite"),
        (parse_bytes, True, "is not a size"),
        (parse_bytes, "1e999 GB", "finite"),
    ],
)
def test_a_wrong_quantity_is_one_line_that_helps(parse, value, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        parse(value)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_formats() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(999.6e6) == "1.00 GB"
    assert format_bytes(24 * 2**30, binary=True) == "24.0 GiB"
    assert format_rate(25e9) == "25.0 GB/s"
    assert format_time(0.0032) == "3.20 ms"
    assert format_time(0) == "0 s"
    assert format_duration(41.2) == "42 s"
    assert format_duration(185) == "3 min 5 s"
    assert format_duration(7800) == "2 h 10 min"


@given(st.integers(min_value=0, max_value=2**60), st.booleans())
def test_what_is_written_reads_back_within_its_digits(size: int, binary: bool) -> None:
    assert parse_bytes(format_bytes(size, binary)) == pytest.approx(size, rel=0.006)


@given(st.sampled_from(sorted(BYTE_UNITS)), st.integers(min_value=0, max_value=10**6))
def test_every_unit_scales(unit: str, count: int) -> None:
    assert parse_bytes(f"{count} {unit}") == round(count * BYTE_UNITS[unit])
