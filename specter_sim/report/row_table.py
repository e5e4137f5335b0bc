"""The table of all rows: what its columns are, which rows it holds, and how it is embedded.

A column is a list of its distinct texts in sorting order and, a row, a position in that list (-1:
absent). So the page sorts by comparing positions, and repeats no text.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specter_sim.report.markup import Html, element, join
from specter_sim.report.plots import pareto
from specter_sim.report.rows import (
    DEPTH_KEYS,
    POLICY_KEYS,
    SLOT_KEYS,
    Row,
    policy_label,
    short_name,
    value_text,
)
from specter_sim.report.study import Place, evenly
from specter_sim.report.tables import METRIC_COLUMNS, Cell
from specter_sim.units import format_time

MOST_BEST, MOST_SAMPLED = 2000, 1000
PAGE = 25
MOST_CHOICES = 24  # of a column that gets a list to choose from
ABSENT = -1
_NO_VALUE = "-"
# What the columns of METRIC_COLUMNS sort by.
_METRICS = {
    "TPOT": "tpot_s",
    "TPOT p99": "tpot_p99_s",
    "tok/s": "tokens_per_s",
    "hits": "hit_rate",
    "pending": "pending_rate",
    "link B/token": "bytes_per_token",
    "useful": "useful_prefetches",
    "late": "late_prefetches",
    "wasted": "wasted_prefetches",
    "device": "device_bytes",
    "x bound": "distance_to_bound",
}


@dataclass(frozen=True)
class Column:
    """One column: its distinct texts in sorting order, and each row's position among them."""

    name: str
    texts: tuple[str, ...]
    cells: tuple[int, ...]
    numeric: bool
    choices: bool  # whether the page offers its texts to filter by

    def text(self, index: int) -> str:
        """What the table shows in a row."""
        return _NO_VALUE if self.cells[index] == ABSENT else self.texts[self.cells[index]]


def embedded_rows(places: Sequence[Place]) -> list[Row]:
    """The rows the page holds, the fastest first: all of a small sweep.

    Of a large one the fastest, the Pareto front of every place, and a sample of the rest, evenly
    spaced by rank.
    """
    every = (row for _, group in places for row in group)
    ranked = sorted(every, key=lambda row: float(row["tpot_s"]))
    if len(ranked) <= MOST_BEST + MOST_SAMPLED:
        return ranked
    kept = {id(row) for row in ranked[:MOST_BEST]}
    kept |= {id(row) for row in evenly(ranked[MOST_BEST:], MOST_SAMPLED)}
    kept |= {id(row) for _, group in places for row in pareto(group)}
    return [row for row in ranked if id(row) in kept]


def columns_of(rows: Sequence[Row], keys: Sequence[str], place_keys: Sequence[str]) -> list[Column]:
    """The columns of the rows: TPOT, place, memory, system, other metrics.

    `keys` are those that vary in the sweep, `place_keys` those of them that are a place.
    """
    metrics = {name: _metric_column(name, cell, rows) for name, cell in METRIC_COLUMNS.items()}
    made = [metrics.pop("TPOT")]  # first, or a phone would not show it
    told = [*place_keys, *_config_keys(rows, keys)]
    made += [_config_column(key, rows) for key in dict.fromkeys(told)]
    policy = [policy_label(row, keys) for row in rows]
    made.append(_column("policy", policy, policy, choices=True))
    made += [metrics.pop("depth"), _metric_column("TPOT p99", _p99, rows), *metrics.values()]
    marks = [_marks(row) for row in rows]
    if any(marks):
        made.append(_column("marks", marks, marks, choices=True))
    return made


def embedded_json(columns: Sequence[Column]) -> Html:
    """The columns as JSON that is safe inside a script element."""
    table = [
        {
            "name": column.name,
            "texts": column.texts,
            "cells": column.cells,
            "numeric": column.numeric,
        }
        for column in columns
    ]
    text = json.dumps({"page": PAGE, "columns": table}, separators=(",", ":"))
    # Inside a script element only "<" can end it; the others are for old parsers.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(text)


def table_html(columns: Sequence[Column]) -> Html:
    """Filters, and the table with its first page, which is all there is without scripts."""
    count = len(columns[0].cells)
    head = element("tr", *(_header(index, column) for index, column in enumerate(columns)))
    body = [
        element("tr", *(_cell(column, index) for column in columns))
        for index in range(min(PAGE, count))
    ]
    region = element(
        "div",
        element("table", element("thead", head), element("tbody", *body), id="rows"),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="Table of the configurations",
    )
    return join([_filters(columns), region, _pages()])


def _config_keys(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """What gets a column beside the place: memory, and what a preset's name does not say."""
    told = [key for key in keys if key in SLOT_KEYS or key.startswith("memory.")]
    if "preset" in keys:
        told += [key for key in keys if key.startswith(POLICY_KEYS) and _beside_preset(key, rows)]
    return told


def _beside_preset(key: str, rows: Sequence[Row]) -> bool:
    """Whether two rows of one preset differ in a key of the policy."""
    if key == "preset" or key in DEPTH_KEYS:
        return False
    values: dict[str, set[str]] = {}
    for row in rows:
        if row.get("preset") is not None:
            values.setdefault(str(row["preset"]), set()).add(repr(row.get(key)))
    return any(len(found) > 1 for found in values.values())


def _config_column(key: str, rows: Sequence[Row]) -> Column:
    texts = [value_text(key, row.get(key)) for row in rows]
    return _column(short_name(key), [row.get(key) for row in rows], texts, choices=True)


def _metric_column(name: str, cell: Cell, rows: Sequence[Row]) -> Column:
    key, texts = _METRICS.get(name), [cell(row) for row in rows]
    if key is not None:
        return _column(name, [row.get(key) for row in rows], texts)
    values = [int(text) if text.isdigit() else text for text in texts]
    return _column(name, values, texts, choices=True)


def _column(
    name: str, values: Sequence[Any], texts: Sequence[str], choices: bool = False
) -> Column:
    """Distinct texts, in the order of the least value that each stands for."""
    least: dict[str, tuple[int, float, str]] = {}
    for value, text in zip(values, texts, strict=True):
        if value is not None and value != "":
            order = _order(value)
            least[text] = min(order, least.get(text, order))
    ordered = sorted(least, key=lambda text: least[text])
    position = {text: index for index, text in enumerate(ordered)}
    cells = [position.get(text, ABSENT) for text in texts]
    numeric = bool(least) and all(order[0] == 0 for order in least.values())
    few = 1 < len(ordered) <= MOST_CHOICES
    return Column(name, tuple(ordered), tuple(cells), numeric, choices and few)


def _order(value: Any) -> tuple[int, float, str]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, float(value), "") if is_number else (1, 0.0, str(value))


def _p99(row: Row) -> str:
    value = row.get("tpot_p99_s")
    return _NO_VALUE if value is None else format_time(float(value))


def _marks(row: Row) -> str:
    told = {"synthetic": "synthetic trace", "assumed_draft": "assumed draft"}
    return ", ".join(text for key, text in told.items() if row.get(key))


def _header(index: int, column: Column) -> Html:
    button = element("button", column.name, type="button", data_column=index)
    order = "ascending" if column.name == "TPOT" else None
    kind = "number" if column.numeric else None
    return element("th", button, scope="col", aria_sort=order, class_=kind)


def _cell(column: Column, index: int) -> Html:
    return element("td", column.text(index), class_="number" if column.numeric else None)


def _filters(columns: Sequence[Column]) -> Html:
    box = element("input", id="search", type="search", autocomplete="off", spellcheck="false")
    fields = [element("label", "rows that contain ", box)]
    for index, column in enumerate(columns):
        if column.choices:
            options = [element("option", "any", value="")]
            options += [element("option", text, value=at) for at, text in enumerate(column.texts)]
            chooser = element("select", *options, data_column=index)
            fields.append(element("label", f"{column.name} ", chooser))
    fields.append(element("button", "clear", type="button", id="clear"))
    return element("div", *fields, class_="filters", role="search")


def _pages() -> Html:
    return element(
        "div",
        element("button", "previous", type="button", id="previous"),
        element("span", id="count", role="status"),
        element("button", "next", type="button", id="next"),
        class_="pages",
    )
