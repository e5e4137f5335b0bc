"""Where the time goes: a stacked bar for the best run of every system."""

from collections.abc import Sequence

from specter_sim.report.markup import Html, element, join
from specter_sim.report.plots import MOST_BARS, TIME_PARTS
from specter_sim.report.rows import Row, depth_label, policy_label
from specter_sim.report.tables import METRIC_COLUMNS
from specter_sim.units import format_time

BAR_WIDTH = 1000
LEAST_SHARE = 1e-6  # what is smaller is the last digit of a sum


def time_figure(
    places: Sequence[tuple[str, Sequence[Row]]], keys: Sequence[str], most_bytes: float
) -> Html:
    """Bars of the best run of each system within the memory, one group a place, one scale."""
    chosen = [(title, best_of_systems(group, keys, most_bytes)) for title, group in places]
    longest_s = max((sum(parts_s(row)) for _, rows in chosen for row in rows), default=1.0)
    groups = [
        element(
            "figure",
            element("figcaption", title),
            *(_bar(row, keys, longest_s) for row in rows),
        )
        for title, rows in chosen
        if rows
    ]
    return join([_legend(), element("div", *groups, class_="panels")])


def best_of_systems(rows: Sequence[Row], keys: Sequence[str], most_bytes: float) -> list[Row]:
    """The fastest row of each system within the memory, the fastest first, at most so many."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: float(row["tpot_s"])):
        if float(row["device_bytes"]) <= most_bytes:
            best.setdefault(policy_label(row, keys), row)
    return list(best.values())[:MOST_BARS]


def parts_s(row: Row) -> list[float]:
    """Seconds a committed token, by the causes of `TIME_PARTS`; their sum is decoding's."""
    tokens = max(1, int(row["committed_tokens"]))
    return [max(0.0, float(row[key])) / tokens for _, key, _ in TIME_PARTS]


def _bar(row: Row, keys: Sequence[str], longest_s: float) -> Html:
    told = [
        f"{name} {format_time(part_s)}"
        for (name, _, _), part_s in zip(TIME_PARTS, parts_s(row), strict=True)
        if part_s > LEAST_SHARE * longest_s
    ]
    at, pieces = 0.0, []
    for index, (part_s, text) in enumerate(zip(parts_s(row), _texts(row), strict=True)):
        width = BAR_WIDTH * part_s / longest_s
        title = element("title", text)
        shape = {"x": round(at, 1), "y": 0, "width": round(width, 1), "height": 10}
        pieces.append(element("rect", title, class_=f"part-{index}", **shape))
        at += width
    bar = element(
        "svg",
        *pieces,
        viewBox=f"0 0 {BAR_WIDTH} 10",
        preserveAspectRatio="none",
        class_="bar",
        role="img",
        aria_label=", ".join(told),
    )
    name = f"{policy_label(row, keys)}, depth {depth_label(row)}, {_slots(row)}"
    head = element("div", element("span", name), element("b", METRIC_COLUMNS["TPOT"](row)))
    return element("div", head, bar, element("small", ", ".join(told)), class_="system")


def _texts(row: Row) -> list[str]:
    return [
        f"{name}: {format_time(part_s)} a token"
        for (name, _, _), part_s in zip(TIME_PARTS, parts_s(row), strict=True)
    ]


def _slots(row: Row) -> str:
    return f"{float(row['slots_per_layer']):g} slots"


def _legend() -> Html:
    items = (
        element("li", element("span", class_=f"swatch part-{index}"), name)
        for index, (name, _, _) in enumerate(TIME_PARTS)
    )
    return element("ul", *items, class_="legend")
