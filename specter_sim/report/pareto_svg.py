"""TPOT against device memory as inline SVG: every point says what it is; the front is a line."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specter_sim.report.markup import Html, element, join, paragraph
from specter_sim.report.plots import leading_policies, pareto
from specter_sim.report.rows import Row, depth_label, policy_label
from specter_sim.report.tables import METRIC_COLUMNS
from specter_sim.units import format_bytes, format_time

WIDTH, HEIGHT = 360, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 8, 36
OTHERS = "other"
# One shape a policy, drawn around the origin: colours alone do not tell points apart for everyone.
SHAPES = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0",
    "M-3 -3h6v6h-6z",
    "M0 -3.6L3.6 3H-3.6z",
    "M0 -4L4 0L0 4L-4 0z",
    "M0 3.6L3.6 -3H-3.6z",
    "M-1.2 -3.6h2.4v2.4h2.4v2.4h-2.4v2.4h-2.4v-2.4h-2.4v-2.4h2.4z",
    "M-3.5 -2.2L-2.2 -3.5L0 -1.3L2.2 -3.5L3.5 -2.2L1.3 0L3.5 2.2L2.2 3.5L0 1.3L-2.2 3.5L-3.5 2.2L-1.3 0z",  # noqa: E501
)
OTHER_SHAPE = "M-1.6 0a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0"


@dataclass(frozen=True)
class Scale:
    """One axis: the position of a value in the drawing, and the values that get a tick."""

    position: Callable[[float], float]
    ticks: tuple[float, ...]


def pareto_figure(places: Sequence[tuple[str, Sequence[Row]]], keys: Sequence[str]) -> Html:
    """One panel a place, on the same scales. `keys` are what varies among all rows."""
    rows = [row for _, group in places for row in group]
    memory = linear_scale([float(row["device_bytes"]) for row in rows], LEFT, WIDTH - RIGHT)
    tpot = log_scale([float(row["tpot_s"]) for row in rows], HEIGHT - BOTTOM, TOP)
    labels = leading_policies(rows, (group for _, group in places), keys)
    panels = [
        element("figure", element("figcaption", title), _panel(group, keys, labels, memory, tpot))
        for title, group in places
    ]
    told = paragraph(
        "Point at a mark, tap it, or move to one of the front with the Tab key.",
        id="point",
        class_="point",
        role="status",
    )
    return join([_shapes(), element("div", *panels, class_="panels"), told, _legend(labels)])


def linear_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale from a little below the least value to a little above the largest."""
    low, high = min(values), max(values)
    margin = 0.05 * ((high - low) or high or 1.0)
    low, high = low - margin, high + margin
    step = _nice_step((high - low) / 4)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Scale(lambda value: start + (end - start) * (value - low) / (high - low), tuple(ticks))


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """A logarithmic scale of values above 0, with ticks at 1, 2 and 5 where these are enough."""
    low, high = min(values) / 1.05, max(values) * 1.05
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if math.log10(tick).is_integer()]
    if len(ticks) < 3:
        step = _nice_step((high - low) / 4)
        ticks = [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
    span = math.log(high / low)
    return Scale(lambda value: start + (end - start) * math.log(value / low) / span, tuple(ticks))


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return min((digit * power for digit in (1, 2, 5, 10)), key=lambda step: abs(step - rough))


def _panel(
    rows: Sequence[Row], keys: Sequence[str], labels: Sequence[str], memory: Scale, tpot: Scale
) -> Html:
    front = pareto(rows)
    on_front = {id(row) for row in front}
    # The fastest last, above the others; points of the front last of all.
    ordered = sorted(rows, key=lambda row: (id(row) in on_front, -float(row["tpot_s"])))
    points = [_point(row, keys, labels, memory, tpot, id(row) in on_front) for row in ordered]
    return element(
        "svg",
        _axes(memory, tpot),
        element("path", d=_steps(front, memory, tpot), class_="front"),
        *points,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="group",
        aria_label=f"TPOT against device memory, {len(rows)} configurations, "
        f"{len(front)} on the Pareto front",
    )


def _point(
    row: Row,
    keys: Sequence[str],
    labels: Sequence[str],
    memory: Scale,
    tpot: Scale,
    on_front: bool,
) -> Html:
    label = policy_label(row, keys)
    name = str(labels.index(label)) if label in labels else OTHERS
    told = (
        f"{METRIC_COLUMNS['TPOT'](row)} a token, {format_bytes(float(row['device_bytes']))}: "
        f"{label}, depth {depth_label(row)}, {float(row['slots_per_layer']):g} slots a layer"
    )
    return element(
        "use",
        element("title", told),
        href=f"#shape-{name}",
        x=round(memory.position(float(row["device_bytes"])), 1),
        y=round(tpot.position(float(row["tpot_s"])), 1),
        class_=f"mark policy-{name}{' on-front' if on_front else ''}",
        tabindex=0 if on_front else None,
        role="img" if on_front else None,
        aria_label=told if on_front else None,
    )


def _steps(front: Sequence[Row], memory: Scale, tpot: Scale) -> str:
    path = ""
    for row in front:
        x = round(memory.position(float(row["device_bytes"])), 1)
        y = round(tpot.position(float(row["tpot_s"])), 1)
        path += f"H{x}V{y}" if path else f"M{x} {y}"
    return f"{path}H{WIDTH - RIGHT}" if path else "M0 0"


def _axes(memory: Scale, tpot: Scale) -> Html:
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    parts = []
    for tick in tpot.ticks:
        y = round(tpot.position(tick), 1)
        parts.append(element("path", d=f"M{LEFT} {y}H{WIDTH - RIGHT}", class_="grid"))
        told = tick_text(format_time(tick))
        parts.append(element("text", told, x=LEFT - 5, y=y + 4, text_anchor="end"))
    for tick in memory.ticks:
        x = round(memory.position(tick), 1)
        parts.append(element("path", d=f"M{x} {bottom}v4", class_="tick"))
        text = element(
            "text", tick_text(format_bytes(tick)), x=x, y=bottom + 16, text_anchor="middle"
        )
        parts.append(text)
    edge = f"M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"
    parts.append(element("path", d=edge, class_="tick"))
    named = element("text", "device memory", x=middle, y=HEIGHT - 5, text_anchor="middle")
    return join([*parts, named, element("text", "TPOT", x=LEFT + 5, y=TOP + 10)])


def tick_text(quantity: str) -> str:
    """A quantity without the zeros that say how exact it is: "50 ms" for "50.0 ms"."""
    return re.sub(r"(\.\d*?)0+(?= )", r"\1", quantity).replace(". ", " ")


def _shapes() -> Html:
    named = [*enumerate(SHAPES), (OTHERS, OTHER_SHAPE)]
    paths = (element("path", id=f"shape-{name}", d=shape) for name, shape in named)
    defined = element("defs", *paths)
    return element("svg", defined, width=0, height=0, class_="shapes", aria_hidden="true")


def _legend(labels: Sequence[str]) -> Html:
    named = [*((str(index), label) for index, label in enumerate(labels)), (OTHERS, "others")]
    items = [
        element(
            "li",
            element(
                "svg",
                element("use", href=f"#shape-{name}", class_=f"policy-{name}"),
                viewBox="-6 -6 12 12",
                class_="key",
                aria_hidden="true",
            ),
            label,
        )
        for name, label in named
    ]
    return element("ul", *items, class_="legend")
