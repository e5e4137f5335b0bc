"""The figures of a sweep, as PNG files. Every figure is titled with its conditions."""

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from specter_sim.report.rows import (
    Row,
    best_by,
    conditions,
    depth_label,
    fits,
    panels,
    policy_label,
    reads_future,
    short_name,
    varying,
)
from specter_sim.units import format_bytes
from specter_traces.files import write_atomic

MOST_PANELS = 3
MOST_POLICIES = 7
MOST_BARS = 10
# Okabe and Ito's palette: told apart with every kind of colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
TIME_PARTS = (
    ("draft", "draft_s", "#56B4E9"),
    ("compute", "compute_s", "#009E73"),
    ("stall: demand load", "stall_demand_s", "#D55E00"),
    ("stall: late prefetch", "stall_late_s", "#E69F00"),
    ("stall: join", "stall_join_s", "#CC79A7"),
    ("idle", "idle_s", "#999999"),
)


def draw_all(rows: Sequence[Row], folder: Path, date: str) -> list[Path]:
    """Draw every figure that the rows have data for.

    Rows without a TPOT are left out, and those that need more memory than the device has, unless
    none fits.
    """
    known = [row for row in rows if row.get("tpot_s")]
    known = [row for row in known if fits(row)] or known
    if not known:
        return []
    figures: dict[str, Callable[[Sequence[Row], str], Figure | None]] = {
        "tpot_slots.png": tpot_against_slots,
        "depth_slots.png": depth_slots_map,
        "pareto.png": pareto_front,
        "time.png": where_time_goes,
    }
    drawn = ((name, draw(known, date)) for name, draw in figures.items())
    return [_save(folder / name, figure) for name, figure in drawn if figure is not None]


def tpot_against_slots(rows: Sequence[Row], date: str) -> Figure | None:
    """Least TPOT over the remaining axes against slots a layer, one line a policy."""
    slots = {row["slots_per_layer"] for row in rows}
    if len(slots) < 2:
        return None
    figure, axes, shown = _panels(rows)
    keys = varying(rows)
    labels = leading_policies(rows, _panel_rows(rows), keys)
    for axis, panel in zip(axes, shown, strict=True):
        for index, label in enumerate(labels):
            line = _least_by_slots(row for row in panel if policy_label(row, keys) == label)
            if line:
                axis.plot(
                    [at for at, _ in line],
                    [1e3 * tpot_s for _, tpot_s in line],
                    marker=MARKERS[index % len(MARKERS)],
                    color=COLOURS[index % len(COLOURS)],
                    label=label,
                    markersize=4,
                    linewidth=1.4,
                )
        axis.set_xlabel("slots a MoE layer")
        _log_milliseconds(axis)
    axes[0].set_ylabel("TPOT (ms)")
    left_out = len({policy_label(row, keys) for row in rows}) - len(labels)
    more = f"; {left_out} policies left out" if left_out else ""
    _finish(figure, axes, rows, f"TPOT against slots, best depth of each policy{more}", date)
    return figure


def depth_slots_map(rows: Sequence[Row], date: str) -> Figure | None:
    """Least TPOT over the remaining axes by lookahead depth and slots a layer (or memory)."""
    real = [row for row in rows if not reads_future(row)]
    depths = sorted({depth_label(row) for row in real}, key=_depth_order)
    axis_name, memory_of, memory_text = _memory_axis(rows)
    memories = sorted({memory_of(row) for row in real})
    if len(depths) < 2 or len(memories) < 2:
        return None
    figure, axes, shown = _panels(real, height=1.6 + 0.42 * len(depths))
    for axis, panel in zip(axes, shown, strict=True):
        grid = np.full((len(depths), len(memories)), np.nan)
        for row in panel:
            at = depths.index(depth_label(row)), memories.index(memory_of(row))
            grid[at] = np.nanmin([grid[at], 1e3 * float(row["tpot_s"])])
        _draw_grid(axis, grid)
        axis.set_xticks(range(len(memories)), [memory_text(memory) for memory in memories])
        axis.set_yticks(range(len(depths)), depths)
        axis.set_xlabel(axis_name)
    axes[0].set_ylabel("lookahead depth")
    title = "TPOT (ms), best policy of each cell; boxed: best depth of a column"
    _finish(figure, axes, real, title, date, legend=False)
    return figure


def pareto_front(rows: Sequence[Row], date: str) -> Figure | None:
    """TPOT and device memory of every row, and the rows that none beats in both."""
    figure, axes, shown = _panels(rows)
    keys = varying(rows)
    labels = leading_policies(rows, _panel_rows(rows), keys)
    size_bytes, unit = _memory_unit(rows)
    for axis, panel in zip(axes, shown, strict=True):
        front = pareto(panel)
        for row in panel:
            _draw_point(axis, row, policy_label(row, keys), labels, size_bytes)
        axis.plot(
            [float(row["device_bytes"]) / size_bytes for row in front],
            [1e3 * float(row["tpot_s"]) for row in front],
            drawstyle="steps-post",
            color="#444444",
            linewidth=1.0,
            label="Pareto front",
            zorder=0,
        )
        axis.set_xlabel(f"device memory ({unit})")
        _log_milliseconds(axis)
    axes[0].set_ylabel("TPOT (ms)")
    title = "TPOT and device memory, all of it charged; down and left is better"
    _finish(figure, axes, rows, title, date)
    return figure


def where_time_goes(rows: Sequence[Row], date: str) -> Figure | None:
    """Milliseconds a token by cause, for the best run of each policy in the best run's memory."""
    keys = varying(rows)
    best = best_by(rows)
    if best is None:
        return None
    most_bytes = float(best["device_bytes"])
    figure, axes, shown = _panels(rows, height=2.6, stacked=True)
    for axis, panel in zip(axes, shown, strict=True):
        bars = _best_of_each([row for row in panel if row["device_bytes"] <= most_bytes], keys)
        _draw_bars(axis, bars)
        names = [f"{policy_label(row, keys)}, depth {depth_label(row)}" for row in bars]
        axis.set_yticks(range(len(bars)), names, fontsize=7)
    axes[-1].set_xlabel("decoding, ms a committed token")
    axes[-1].set_xlim(0, 1.03 * max(axis.dataLim.xmax for axis in axes))
    title = f"Where the time goes, best run of each policy within {format_bytes(most_bytes)}"
    _finish(figure, axes, rows, title, date)
    return figure


def pareto(rows: Iterable[Row]) -> list[Row]:
    """The rows that no other beats in both device memory and TPOT, by rising memory; no bounds."""
    front: list[Row] = []
    real = (row for row in rows if not reads_future(row))
    for row in sorted(real, key=lambda row: (float(row["device_bytes"]), float(row["tpot_s"]))):
        if not front or float(row["tpot_s"]) < float(front[-1]["tpot_s"]):
            front.append(row)
    return front


def _panels(
    rows: Sequence[Row], height: float = 3.6, stacked: bool = False
) -> tuple[Figure, list[Axes], list[list[Row]]]:
    shown = panels(rows, MOST_PANELS)
    count = len(shown)
    wide, high = (1, count) if stacked else (count, 1)
    # No pyplot: its state is the caller's. A plain Figure draws without a display.
    figure = Figure(figsize=(max(8.0, 4.4 * wide), height * high + 1.4), layout="constrained")
    grid = figure.subplots(high, wide, sharex=stacked, sharey=not stacked, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for axis, (title, _) in zip(axes, shown, strict=True):
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    return figure, axes, [panel for _, panel in shown]


def _finish(
    figure: Figure,
    axes: Sequence[Axes],
    rows: Sequence[Row],
    title: str,
    date: str,
    legend: bool = True,
) -> None:
    wide = int(13 * figure.get_figwidth())  # characters that fit at this size
    lines = [*textwrap.wrap(title, wide), *textwrap.wrap(conditions(rows, date), wide)]
    figure.suptitle("\n".join(lines), fontsize=9)
    if legend:
        entries: dict[str, Any] = {}
        for axis in axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=3, fontsize=7.5
        )


def _save(path: Path, figure: Figure) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return write_atomic(path, picture.getvalue())


def _log_milliseconds(axis: Axes) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="major", linewidth=0.4, color="#DDDDDD")


def _memory_axis(
    rows: Sequence[Row],
) -> tuple[str, Callable[[Row], float], Callable[[float], str]]:
    """What the columns of a map are: slots, or the memory that was varied in their place."""
    keys = varying(rows)
    instead = [key for key in ("memory.budget", "machine.vram") if key in keys]
    if instead and "memory.slots" not in keys:
        return short_name(instead[0]), lambda row: float(row[instead[0]] or 0), format_bytes
    return "slots a MoE layer", lambda row: float(row["slots_per_layer"]), "{:.3g}".format


def _memory_unit(rows: Sequence[Row]) -> tuple[float, str]:
    return (1e9, "GB") if max(float(row["device_bytes"]) for row in rows) >= 1e9 else (1e6, "MB")


def _draw_point(axis: Axes, row: Row, label: str, labels: Sequence[str], size_bytes: float) -> None:
    index = labels.index(label) if label in labels else None
    axis.plot(
        float(row["device_bytes"]) / size_bytes,
        1e3 * float(row["tpot_s"]),
        marker="." if index is None else MARKERS[index % len(MARKERS)],
        color="#BBBBBB" if index is None else COLOURS[index % len(COLOURS)],
        label="other policies" if index is None else label,
        linestyle="",
        markersize=4,
        alpha=0.75,
    )


def leading_policies(
    rows: Sequence[Row], places: Iterable[Sequence[Row]], keys: Sequence[str]
) -> list[str]:
    """The policies told apart: those on the front of a place, then those with the least TPOT."""
    on_fronts = (row for place in places for row in pareto(place))
    by_tpot = sorted(rows, key=lambda row: float(row["tpot_s"]))
    labels = dict.fromkeys(policy_label(row, keys) for row in [*on_fronts, *by_tpot])
    return list(labels)[:MOST_POLICIES]


def _panel_rows(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    return (panel for _, panel in panels(rows, MOST_PANELS))


def _least_by_slots(rows: Iterable[Row]) -> list[tuple[float, float]]:
    least: dict[float, float] = {}
    for row in rows:
        at = float(row["slots_per_layer"])
        least[at] = min(float(row["tpot_s"]), least.get(at, math.inf))
    return sorted(least.items())


def _depth_order(label: str) -> tuple[bool, float, str]:
    return (not label.isdigit(), float(label) if label.isdigit() else 0.0, label)


def _draw_grid(axis: Axes, grid: "np.ndarray[Any, np.dtype[np.float64]]") -> None:
    """Cells coloured by the logarithm, each with its number; the best of each column boxed."""
    axis.imshow(np.log(grid), aspect="auto", cmap="viridis_r", origin="lower")
    middle = np.nanmean([np.nanmin(np.log(grid)), np.nanmax(np.log(grid))])
    for (row, column), value in np.ndenumerate(grid):
        if math.isnan(value):
            continue
        colour = "white" if math.log(value) > middle else "black"
        best = value == np.nanmin(grid[:, column])
        box = {"boxstyle": "square,pad=0.15", "fill": False, "edgecolor": colour} if best else None
        axis.text(
            column,
            row,
            f"{value:.3g}",
            ha="center",
            va="center",
            color=colour,
            fontsize=7,
            fontweight="bold" if best else "normal",
            bbox=box,
        )


def _best_of_each(rows: Sequence[Row], keys: Sequence[str]) -> list[Row]:
    """The fastest row of each policy, slowest first."""
    best: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: float(row["tpot_s"])):
        best.setdefault(policy_label(row, keys), row)
    return list(best.values())[:MOST_BARS][::-1]


def _draw_bars(axis: Axes, rows: Sequence[Row]) -> None:
    at = np.arange(len(rows))
    left = np.zeros(len(rows))
    for name, key, colour in TIME_PARTS:
        widths = np.array([1e3 * float(row[key]) / int(row["committed_tokens"]) for row in rows])
        axis.barh(at, widths, left=left, label=name, color=colour, height=0.7)
        left += widths
    axis.grid(True, axis="x", linewidth=0.4, color="#DDDDDD")
    axis.set_axisbelow(True)
