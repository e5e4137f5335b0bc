"""How much TPOT depends on each axis of a sweep."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specter_sim.report.rows import (
    DEPTH_KEYS,
    POLICY_KEYS,
    Row,
    depth_label,
    policy_label,
    short_name,
    value_text,
    varying,
)
from specter_sim.report.study import evenly


@dataclass(frozen=True)
class ValueEffect:
    """One value of an axis: TPOT over the rows that have it."""

    text: str
    best_s: float
    median_s: float
    count: int


@dataclass(frozen=True)
class AxisEffect:
    """One axis, its values in order."""

    name: str
    values: tuple[ValueEffect, ...]
    combined: bool = False  # of several keys, each of which is an axis too

    @property
    def effect(self) -> float:
        """What the wrong value costs when all else is chosen best: worst / best of the best."""
        least = [value.best_s for value in self.values]
        return max(least) / min(least)

    @property
    def median_effect(self) -> float:
        """The same ratio of the medians: what it costs when all else is chosen blindly."""
        middle = [value.median_s for value in self.values]
        return max(middle) / min(middle)

    def leading(self, most: int) -> list[ValueEffect]:
        """At most so many values and the best one, evenly chosen."""
        best = min(self.values, key=lambda value: value.best_s)
        kept = evenly(self.values, most)
        return [value for value in self.values if value in kept or value is best]


def sensitivities(rows: Sequence[Row]) -> list[AxisEffect]:
    """The effect of every axis that varies in the rows, the strongest first.

    Every row needs a TPOT. Depth is one axis, whatever keys give it; when several keys of the
    policy vary, their combination is an axis too ("system"), unless presets name it.
    """
    keys = varying(rows)
    single = [key for key in keys if key not in DEPTH_KEYS]
    effects = [_effect(short_name(key), _by_key(key), rows) for key in single]
    if len({depth_label(row) for row in rows}) > 1:
        effects.append(_effect("depth", _by_depth, rows))
    if "preset" not in keys and sum(key.startswith(POLICY_KEYS) for key in single) > 1:
        system = _effect("system", lambda row: (policy_label(row, keys),) * 2, rows)
        effects.append(replace(system, combined=True))
    return sorted(effects, key=lambda effect: -effect.effect)


def summary(effects: Sequence[AxisEffect]) -> str:
    """Which axis matters most, in one sentence; `effects` hold at least one that is not combined.

    The strongest when all else is chosen best may not be the strongest in the median.
    """
    single = [effect for effect in effects if not effect.combined]
    tuned = max(single, key=lambda effect: effect.effect)
    blind = max(single, key=lambda effect: effect.median_effect)
    told = f"{tuned.name} matters most: its worst value costs x{tuned.effect:.2f} when all "
    told += "other axes are chosen best"
    if blind is tuned:
        return f"{told}, x{blind.median_effect:.2f} in the median."
    return f"{told}; in the median it is {blind.name}, x{blind.median_effect:.2f}."


def _by_key(key: str) -> Callable[[Row], tuple[Any, str]]:
    return lambda row: (row.get(key), value_text(key, row.get(key)))


def _by_depth(row: Row) -> tuple[Any, str]:
    label = depth_label(row)
    return (int(label) if label.isdigit() else label), label


def _effect(
    name: str, value_of: Callable[[Row], tuple[Any, str]], rows: Sequence[Row]
) -> AxisEffect:
    groups: dict[str, tuple[Any, str, list[float]]] = {}
    for row in rows:
        value, text = value_of(row)
        groups.setdefault(repr(value), (value, text, []))[2].append(float(row["tpot_s"]))
    ordered = sorted(groups.values(), key=lambda group: _order(group[0]))
    return AxisEffect(
        name,
        tuple(
            ValueEffect(text, min(times), statistics.median(times), len(times))
            for _, text, times in ordered
        ),
    )


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then texts, absent values first."""
    if value is None:
        return (0, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (2, 0.0, str(value))
