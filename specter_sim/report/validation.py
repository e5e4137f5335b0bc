"""Predictions that were held against a measurement, and the one nearest to a row.

A validation file is JSON:

    {"points": [{"name": "tiny-moe on demand", "date": "2026-11-30",
                 "machine": "what was measured, in words", "source": "how, in words",
                 "config": {"model": "tiny-moe", "machine.link_bandwidth": 1e8},
                 "metric": "tpot_s", "predicted": 0.0061, "measured": 0.0064}]}

`config` gives columns of a sweep's results.csv that the measurement was made at; only these count
for the distance. The installed package's own files are `specter_sim/data/validation/*.json`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from specter_sim.names import suggestion
from specter_sim.report.rows import Row
from specter_traces.errors import UsageError

FAR = 10.0  # two numbers a factor of ten apart are as different as two names


@dataclass(frozen=True)
class ValidatedPoint:
    """One metric, predicted and measured under the same configuration."""

    name: str
    date: str
    machine: str
    source: str
    config: Mapping[str, Any]
    metric: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted / measured - 1: above zero when the prediction was too slow (of a time)."""
        return self.predicted / self.measured - 1


def packaged_points() -> list[ValidatedPoint]:
    """The validated points that the package ships; none when it ships none."""
    folder = files("specter_sim") / "data" / "validation"
    if not folder.is_dir():
        return []
    named = sorted(folder.iterdir(), key=lambda file: file.name)
    return [
        point
        for file in named
        if file.name.endswith(".json")
        for point in parse_points(file.read_text(encoding="utf-8"), file.name)
    ]


def read_points(path: Path) -> list[ValidatedPoint]:
    """The points of a validation file. Raises UsageError naming what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"cannot read the validation file {path}: {reason}") from None
    return parse_points(text, str(path))


def parse_points(text: str, name: str) -> list[ValidatedPoint]:
    """The points of a validation file's text; `name` is how errors call the file."""
    try:
        points = json.loads(text)["points"]
        return [_point(table) for table in points]
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f'{name} is no validation file: it must be {{"points": [..]}} in JSON'
        ) from None


def nearest(points: Iterable[ValidatedPoint], row: Row) -> ValidatedPoint | None:
    """The point whose configuration differs least from the row's; None without points."""
    return min(points, key=lambda point: distance(point, row), default=None)


def distance(point: ValidatedPoint, row: Row) -> float:
    """How far the row is from the point: one for each key that differs, less for near numbers."""
    return sum(_apart(value, row.get(key)) for key, value in point.config.items())


def differences(point: ValidatedPoint, row: Row) -> list[str]:
    """The keys of the point that the row has other values of."""
    return [key for key, value in point.config.items() if _apart(value, row.get(key)) > 0]


def _apart(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    if not (_is_number(one) and _is_number(other)) or min(one, other) <= 0:
        return 1.0
    return min(1.0, abs(math.log(one / other)) / math.log(FAR))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _point(table: Any) -> ValidatedPoint:
    if not isinstance(table, Mapping):
        raise UsageError(f"a point must be a table, got {table!r}")
    known = [field.name for field in fields(ValidatedPoint)]
    _check_names(table, known)
    for key in known:
        value = table[key]
        if key in ("predicted", "measured"):
            if not _is_number(value) or value <= 0:
                raise UsageError(f"{key} must be a number above 0, got {value!r}")
        elif not isinstance(value, Mapping if key == "config" else str):
            kind = "a table" if key == "config" else "a text"
            raise UsageError(f"{key} must be {kind}, got {value!r}")
    return ValidatedPoint(**table)


def _check_names(table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f'unknown key "{key}" of a point: {suggestion(key, known)}')
    missing = [key for key in known if key not in table]
    if missing:
        raise UsageError(f"a point lacks {', '.join(missing)}")
