"""Quantities with units, at the edges: "24 GiB", "25 GB/s", "3.2 ms". Inside, bytes and seconds.

GB is 10^9 bytes and GiB is 2^30 bytes. A bare number is already in base units.
"""

import math
import re

from specter_sim.names import suggestion
from specter_traces.errors import UsageError, shown

Number = int | float

BYTE_UNITS: dict[str, float] = {
    "B": 1,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
RATE_UNITS: dict[str, float] = {f"{unit}/s": scale for unit, scale in BYTE_UNITS.items()}
TIME_UNITS: dict[str, float] = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60}

_QUANTITY = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def parse_bytes(value: str | Number) -> int:
    """Whole bytes from "24 GiB" or a bare number of bytes; not negative."""
    return round(_parse(value, "a size", "24 GiB", BYTE_UNITS, bare="B"))


def parse_rate(value: str | Number) -> float:
    """Bytes per second from "25 GB/s" or a bare number; not negative."""
    return _parse(value, "a rate", "25 GB/s", RATE_UNITS, bare="B/s")


def parse_time(value: str | Number) -> float:
    """Seconds from "3.2 ms" or a bare number of seconds; not negative."""
    return _parse(value, "a time", "3.2 ms", TIME_UNITS, bare="s")


def parse_quantity(value: str | Number) -> float:
    """Base units from a quantity of any kind: the unit says which. Raises UsageError."""
    return _parse(value, "a quantity", "24 GiB", BYTE_UNITS | RATE_UNITS | TIME_UNITS, bare="")


def format_bytes(size_bytes: float, binary: bool = False) -> str:
    """ "1.50 GB", or "1.40 GiB" when `binary`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "kB", "MB", "GB", "TB")
    return _format(size_bytes, [(BYTE_UNITS[unit], unit) for unit in units])


def format_rate(bytes_per_s: float) -> str:
    """ "25.0 GB/s"."""
    return _format(bytes_per_s, [(BYTE_UNITS[u], f"{u}/s") for u in ("B", "kB", "MB", "GB", "TB")])


def format_time(seconds: float) -> str:
    """ "3.20 ms"; zero is "0 s"."""
    if seconds == 0:
        return "0 s"
    return _format(seconds, [(TIME_UNITS[unit], unit) for unit in ("ns", "us", "ms", "s")])


def format_duration(seconds: float) -> str:
    """A waiting time for people: "42 s", "3 min 5 s", "2 h 10 min"."""
    whole = max(0, math.ceil(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _parse(
    value: str | Number, kind: str, example: str, units: dict[str, float], bare: str
) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UsageError(f'{shown(value)} is not {kind}: write it like "{example}"')
    if isinstance(value, str):
        number = _from_text(value, kind, example, units, bare)
    else:
        number = _as_float(value)
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{kind} must be finite and not negative, got {shown(value)}")
    return number


def _as_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _from_text(text: str, kind: str, example: str, units: dict[str, float], bare: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UsageError(f'{shown(text)} is not {kind}: write it like "{example}"')
    unit = match[2] or bare
    if unit and unit not in units:
        raise UsageError(f'unknown unit "{unit}" in "{text}": {suggestion(unit, units)}')
    return float(match[1]) * units.get(unit, 1.0)


def _format(value: float, units: list[tuple[float, str]]) -> str:
    scale, unit = units[0]
    for candidate_scale, candidate in units:
        # 999.6 would print as 1000: move on to the next unit a little early.
        if abs(value) >= candidate_scale * 0.9995:
            scale, unit = candidate_scale, candidate
    shown = value / scale
    if scale == 1 and shown == int(shown) and unit == "B":
        return f"{int(shown)} {unit}"
    digits = 0 if abs(shown) >= 99.95 else 1 if abs(shown) >= 9.995 else 2
    return f"{shown:.{digits}f} {unit}"
