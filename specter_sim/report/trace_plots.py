"""Figures of one router trace: who is popular, how local routing is, how well a draft foretells."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from specter_traces.errors import printable
from specter_traces.files import write_atomic
from specter_traces.summary import Summary

_MARK_COLOUR = "firebrick"
_UNIFORM: dict[str, Any] = {"color": "0.55", "linestyle": ":", "label": "uniform routing"}


def plot_trace(summary: Summary, folder: Path) -> list[Path]:
    """Draw every figure that `summary` allows as PNG; return the files.

    Figures of a synthetic trace or an assumed draft say so in red in their title. Raises
    UsageError when the folder cannot be written.
    """
    figures = {
        "popularity": _popularity(summary),
        "locality": _locality(summary),
        "union": _union(summary),
    }
    if summary.draft is not None or summary.gate is not None:
        figures["draft"] = _draft(summary)
    return [_write(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _write(figure: Figure, path: Path) -> Path:
    buffer = io.BytesIO()
    with matplotlib.rc_context({"savefig.dpi": 120}):
        figure.savefig(buffer, format="png")
    return write_atomic(path, buffer.getvalue())


def _figure(summary: Summary, title: str, panels: int) -> tuple[Figure, list[Any]]:
    """Return a row of panels under a title that carries the conditions and every mark."""
    figure = Figure(figsize=(5.2 * panels, 4.6), layout="constrained")
    header = summary.header
    lines = [
        f"{title}: {header.name}",
        f"{header.num_layers} layers x {header.num_experts} experts, top-{header.top_k}, "
        f"{summary.num_positions:,} positions, text: {header.decoding.value}",
        *([" · ".join(header.marks).upper()] if header.marks else []),
    ]
    colour = _MARK_COLOUR if header.marks else "black"
    # Names come out of a file: nothing in them is a formula or breaks the line.
    text = "\n".join(map(printable, lines))
    figure.suptitle(text, fontsize=11, color=colour, parse_math=False)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def _popularity(summary: Summary) -> Figure:
    figure, (ranks, heat) = _figure(summary, "Popularity", 2)
    use = -np.sort(-summary.popularity, axis=1)
    place = np.arange(1, use.shape[1] + 1)
    ranks.fill_between(place, use.min(0), use.max(0), alpha=0.25, label="range over layers")
    ranks.plot(place, use.mean(0), label="mean over layers")
    ranks.axhline(summary.header.top_k / summary.header.num_experts, **_UNIFORM)
    ranks.set(xlabel="expert, by rank within its layer", ylabel="share of positions that use it")
    ranks.set_ylim(bottom=0)
    ranks.legend()
    image = heat.imshow(summary.popularity, aspect="auto", cmap="viridis", interpolation="nearest")
    heat.set(xlabel="expert", ylabel="layer")
    figure.colorbar(image, ax=heat, label="share of positions")
    return figure


def _locality(summary: Summary) -> Figure:
    figure, (layers, lags, entropy) = _figure(summary, "Locality", 3)
    top_k = summary.header.top_k
    layers.plot(summary.overlap_by_lag[0], marker=".", label="neighbours")
    layers.axhline(summary.uniform_overlap, **_UNIFORM)
    layers.set(xlabel="layer", ylabel=f"shared experts of {top_k}", ylim=(0, top_k))
    layers.legend()
    _spread(lags, summary.lags, summary.overlap_by_lag)
    lags.axhline(summary.uniform_overlap, **_UNIFORM)
    lags.set(xlabel="distance in tokens", ylabel=f"shared experts of {top_k}", ylim=(0, top_k))
    lags.set_xlim(summary.lags[0] / 1.15, summary.lags[-1] * 1.15)
    lags.set_xscale("log", base=2)
    lags.set_xticks(summary.lags, [str(lag) for lag in summary.lags])
    lags.legend()
    entropy.plot(summary.entropy_bits, marker=".", label="measured")
    entropy.axhline(np.log2(summary.header.num_experts), **_UNIFORM)
    entropy.set(xlabel="layer", ylabel="entropy of expert use (bits)")
    entropy.set_ylim(bottom=0)
    entropy.legend()
    return figure


def _union(summary: Summary) -> Figure:
    figure, (panel,) = _figure(summary, "Union", 1)
    lengths = summary.window_lengths
    _spread(panel, lengths, summary.union_growth)
    smooth = np.linspace(lengths[0], lengths[-1], 100)
    panel.plot(smooth, summary.uniform_union(smooth), **_UNIFORM)
    panel.set(xlabel="tokens in a verify pass", ylabel="experts that a layer needs")
    panel.set_xticks(lengths)
    panel.set_ylim(0, summary.header.num_experts)
    panel.legend()
    return figure


def _draft(summary: Summary) -> Figure:
    figure, (layers, distance, depth) = _figure(summary, "Draft", 3)
    if summary.draft is not None:
        layers.plot(summary.draft.recall, marker=".", label="draft: recall")
        layers.plot(summary.draft.exact, marker=".", label="draft: exact set")
    if summary.gate is not None:
        place = np.arange(1, len(summary.gate.recall) + 1)
        layers.plot(place, summary.gate.recall, "--", marker=".", label="early gate: recall")
        layers.plot(place, summary.gate.exact, "--", marker=".", label="early gate: exact set")
    layers.set(xlabel="layer", ylabel="share", ylim=(0, 1.02))
    layers.legend()
    _draft_by_distance(summary, distance)
    _draft_by_depth(summary, depth)
    return figure


def _draft_by_distance(summary: Summary, panel: Any) -> None:
    panel.set(xlabel="tokens between the draft's route and the need", ylabel="recall")
    if summary.recall_by_distance is not None:
        _spread(panel, summary.distances, summary.recall_by_distance)
        panel.axhline(summary.uniform_overlap / summary.header.top_k, **_UNIFORM)
        panel.set_xticks(summary.distances)
        panel.legend()
    panel.set_ylim(0, 1.02)


def _draft_by_depth(summary: Summary, panel: Any) -> None:
    panel.set(xlabel="depth", ylabel="share of windows accepted whole")
    if summary.survival is not None and summary.acceptance is not None:
        rate = summary.acceptance.greedy
        panel.plot(summary.depths, summary.survival, marker="o", label="greedy, measured")
        panel.plot(
            summary.depths,
            rate ** np.array(summary.depths),
            ":",
            color="0.55",
            label=f"{rate:.2f} to the power of depth",
        )
        panel.set_xticks(summary.depths)
        panel.legend()
    panel.set_ylim(0, 1.02)


def _spread(panel: Any, place: tuple[int, ...], values: Any) -> None:
    """Draw [places, L] as a mean over layers within its range; places without data are left out."""
    known = ~np.isnan(values).all(axis=1)
    at, rows = np.array(place)[known], values[known]
    panel.fill_between(at, rows.min(1), rows.max(1), alpha=0.25, label="range over layers")
    panel.plot(at, rows.mean(1), marker="o", label="mean over layers")
