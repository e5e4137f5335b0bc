"""From the `axes` table of a sweep file to points: dotted keys and the values they take together.

An axis is a list, `{linspace = [a, b, n]}`, `{logspace = [a, b, n]}` (n values from a to b, equal
steps or equal ratios) or `{geom = [a, ratio, n]}`. `[[axes.zip]]` tables hold keys that change
together. `filters` are conditions a configuration must meet.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specter_sim.config import check_key, is_integer_key
from specter_sim.sweep.filters import Filter
from specter_sim.units import parse_quantity
from specter_traces.errors import UsageError, shown

Point = dict[str, Any]

MOST_CONFIGURATIONS = 1_000_000


@dataclass(frozen=True)
class Axes:
    """What a sweep varies: a cross product of groups of points, and the filters on it."""

    groups: tuple[tuple[Point, ...], ...]
    filters: tuple[Filter, ...] = ()

    @property
    def most(self) -> int:
        """How many points there are."""
        return math.prod(len(group) for group in self.groups)

    @property
    def keys(self) -> tuple[str, ...]:
        """The dotted keys that vary, in the order of the file."""
        return tuple(dict.fromkeys(key for group in self.groups for key in group[0]))

    def points(self) -> Iterator[Point]:
        """Every combination, the last group varying fastest; filters are not applied yet."""
        for combination in itertools.product(*self.groups):
            yield {key: value for part in combination for key, value in part.items()}


def read_axes(table: Mapping[str, Any]) -> Axes:
    """Read an `axes` table. Raises UsageError naming the axis that is wrong."""
    table = dict(table)
    zipped = table.pop("zip", [])
    filters = table.pop("filters", [])
    groups = [_axis_group(key, spec) for key, spec in _specs(table).items()]
    if not isinstance(zipped, list) or not all(isinstance(group, dict) for group in zipped):
        raise UsageError("axes.zip is an array of tables: write [[axes.zip]] above each group")
    groups += [_zip_group(group) for group in zipped]
    _refuse_twice(groups)
    texts = [filters] if isinstance(filters, str) else filters
    if not isinstance(texts, list):
        raise UsageError(f"axes.filters is a list of conditions, got {shown(texts)}")
    return Axes(tuple(groups), tuple(Filter(text) for text in texts))


def replace_axis(axes: Axes, key: str, spec: Any) -> Axes:
    """The axes with one axis given anew (or added), as `--axis key=spec` does."""
    kept = [group for group in axes.groups if key not in group[0]]
    return Axes((*kept, _axis_group(key, spec)), axes.filters)


def fix_keys(axes: Axes, fixed: Mapping[str, Any]) -> Axes:
    """The axes with every axis of a fixed key replaced by that one value, as `--set` does."""
    for key, value in fixed.items():
        if key in axes.keys:
            axes = replace_axis(axes, key, [value])
    return axes


def _specs(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys with their specifications; `memory.slots = [..]` may be quoted or not."""
    specs: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and not set(value) & set(_RANGES):
            specs |= _specs(value, f"{prefix}{key}.")
        else:
            specs[f"{prefix}{key}"] = value
    return specs


def _axis_group(key: str, spec: Any) -> tuple[Point, ...]:
    return tuple({key: value} for value in _values(key, spec))


def _zip_group(table: Mapping[str, Any]) -> tuple[Point, ...]:
    columns = {key: _values(key, spec) for key, spec in _specs(table).items()}
    lengths = {key: len(values) for key, values in columns.items()}
    if not columns:
        raise UsageError("an [[axes.zip]] group is empty: give it axes or take it out")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise UsageError(f"a zip group needs axes of equal length: {told}")
    return tuple(
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    )


def _refuse_twice(groups: Sequence[tuple[Point, ...]]) -> None:
    seen: set[str] = set()
    for group in groups:
        for key in group[0]:
            if key in seen:
                raise UsageError(f"{key} is on two axes: take one out")
            seen.add(key)


def _values(key: str, spec: Any) -> list[Any]:
    check_key(key)
    values = _range_values(key, spec) if isinstance(spec, Mapping) else spec
    if not isinstance(values, list):
        raise UsageError(
            f"axis {key} must be a list or a range, got {shown(spec)}: write [{shown(spec)}]"
        )
    if not values:
        raise UsageError(f"axis {key} has no values: give it at least one or take it out")
    return values


def _range_values(key: str, spec: Mapping[str, Any]) -> list[Any]:
    kind, *others = spec or ("",)
    if others or kind not in _RANGES:
        raise UsageError(f"axis {key}: a range is one of {', '.join(_RANGES)}, got {shown(spec)}")
    arguments = spec[kind]
    if not isinstance(arguments, list) or len(arguments) != 3:
        raise UsageError(f"axis {key}: {kind} takes three numbers, got {shown(arguments)}")
    first, second = parse_quantity(arguments[0]), parse_quantity(arguments[1])
    count = arguments[2]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"axis {key}: {kind} needs a whole number of values, got {shown(count)}")
    if count > MOST_CONFIGURATIONS:
        raise UsageError(
            f"axis {key}: {kind} gives at most {MOST_CONFIGURATIONS:,} values, got {shown(count)}"
        )
    if kind != "linspace" and min(first, second) <= 0:
        raise UsageError(f"axis {key}: {kind} needs numbers above zero, got {shown(arguments)}")
    values = _finite(key, kind, first, second, count)
    if is_integer_key(key):
        values = [round(value) for value in values]
    return list(dict.fromkeys(values))


def _finite(key: str, kind: str, first: float, second: float, count: int) -> list[int | float]:
    try:
        return [_tidy(value) for value in _RANGES[kind](first, second, count)]
    except (OverflowError, ValueError):  # int() of what is infinite, or no number any more
        raise UsageError(
            f"axis {key}: {kind} leaves the numbers there are: make it short"
        ) from None


def _linspace(first: float, last: float, count: int) -> list[float]:
    steps = max(1, count - 1)
    return [first + (last - first) * index / steps for index in range(count)]


def _logspace(first: float, last: float, count: int) -> list[float]:
    steps = max(1, count - 1)
    return [first * (last / first) ** (index / steps) for index in range(count)]


def _geom(first: float, ratio: float, count: int) -> list[float]:
    return [first * ratio**index for index in range(count)]


def _tidy(value: float) -> int | float:
    """Undo the last-digit noise of a range: 12 significant digits, whole numbers as integers."""
    rounded = float(f"{value:.12g}")
    return rounded if math.isfinite(rounded) and not rounded.is_integer() else int(rounded)


_RANGES: dict[str, Callable[[float, float, int], list[float]]] = {
    "linspace": _linspace,
    "logspace": _logspace,
    "geom": _geom,
}


def filtered(axes: Axes, values: Mapping[str, Any]) -> bool:
    """Whether a whole configuration, as dotted keys, passes every filter."""
    return all(condition.accepts(values) for condition in axes.filters)
