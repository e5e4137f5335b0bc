"""The figure of cache curves: hit rate against slots, one line a policy."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from specter_sim.report.plots import COLOURS, MARKERS
from specter_traces import Header
from specter_traces.files import write_atomic

WIDTH = 100  # characters of a line of the title
MOST_MARKED = 20  # more points than this are a line without markers


class Curve(Protocol):
    """What is drawn of a curve (``engine.curves.Curve``)."""

    @property
    def policy(self) -> str: ...
    @property
    def slots(self) -> NDArray[np.int64]: ...
    @property
    def hits(self) -> NDArray[np.int64]: ...
    def hit_rate(self, layer: int | None = None) -> NDArray[np.float64]: ...
    def knee(self, layer: int | None = None) -> int: ...


def plot_curves(
    curves: Sequence[Curve], header: Header, conditions: str, layer: int | None, path: Path
) -> Path:
    """Draw the curves as PNG, LRU's knee marked, and the spread of its layers; return the file.

    A synthetic trace is named in red. Raises UsageError when the file cannot be written.
    """
    figure = Figure(figsize=(8.0, 5.2), layout="constrained")
    axis = figure.subplots()
    for index, curve in enumerate(curves):
        _draw(axis, curve, layer, index)
    lru = next((curve for curve in curves if curve.policy == "lru"), None)
    if lru is not None:
        _draw_knee(axis, lru, layer)
        if layer is None and len(lru.hits) > 1:
            _draw_layers(axis, lru)
    axis.set(xlabel="slots a MoE layer", ylabel="hit rate", ylim=(0, 1.02))
    axis.set_xlim(left=0)
    axis.grid(True, linewidth=0.4, color="#DDDDDD")
    axis.legend(loc="lower right")
    _title(figure, header, conditions)
    return _write(figure, path)


def _draw(axis: Axes, curve: Curve, layer: int | None, index: int) -> None:
    bound = curve.policy == "belady"
    style: dict[str, Any] = {"color": "black", "linestyle": "--"} if bound else {}
    if not bound:
        style = {"color": COLOURS[index % (len(COLOURS) - 1)]}
    if len(curve.slots) <= MOST_MARKED:
        style |= {"marker": MARKERS[index % len(MARKERS)], "markersize": 4}
    label = "belady (reads the future)" if bound else curve.policy
    axis.plot(curve.slots, curve.hit_rate(layer), label=label, linewidth=1.5, **style)


def _draw_knee(axis: Axes, lru: Curve, layer: int | None) -> None:
    knee, rate = lru.knee(layer), lru.hit_rate(layer)
    at = (float(lru.slots[knee]), float(rate[knee]))
    axis.plot(*at, marker="o", markersize=9, markerfacecolor="none", color=COLOURS[0])
    axis.annotate(
        f"knee of LRU: {lru.slots[knee]} slots, {rate[knee]:.1%}",
        at,
        xytext=(14, -30),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-", "color": "0.4"},
        fontsize=9,
    )


def _draw_layers(axis: Axes, lru: Curve) -> None:
    rates = np.stack([lru.hit_rate(layer) for layer in range(len(lru.hits))])
    axis.fill_between(
        lru.slots,
        rates.min(axis=0),
        rates.max(axis=0),
        color=COLOURS[0],
        alpha=0.12,
        linewidth=0,
        label="lru, range over layers",
    )


def _title(figure: Figure, header: Header, conditions: str) -> None:
    marks = [" · ".join(header.marks).upper()] if header.marks else []
    shape = f"{header.num_layers} layers x {header.num_experts} experts, top-{header.top_k}"
    title = f"Hit rate against slots: {header.name} ({header.model}), {shape}"
    lines = [*textwrap.wrap(title, WIDTH), *textwrap.wrap(conditions, WIDTH), *marks]
    figure.suptitle("\n".join(lines), fontsize=10, color="firebrick" if marks else "black")


def _write(figure: Figure, path: Path) -> Path:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"savefig.dpi": 120}):
        figure.savefig(buffer, format="png")
    return write_atomic(path, buffer.getvalue())
