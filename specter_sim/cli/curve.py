"""`specter-sim curve`: hit rate against slots for every eviction policy, over one trace."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_sim.cli.options import JsonOption, print_json, today

if TYPE_CHECKING:
    from specter_sim.engine.curves import Curve
    from specter_traces import Trace

KNEE = "farthest above the chord between the curve's ends, both axes scaled to their range"


class LookupsChoice(StrEnum):
    """How experts are looked up."""

    BATCHED = "batched"
    SEQUENTIAL = "sequential"


class StartChoice(StrEnum):
    """What a sequence finds."""

    COLD = "cold"
    WARM = "warm"


def curve(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Bundled name or file.")],
    lookups: Annotated[
        LookupsChoice,
        typer.Option(help="A token's experts at once, as decoding does, or one after another."),
    ] = LookupsChoice.BATCHED,
    between: Annotated[
        StartChoice, typer.Option(help="Each sequence starts with an empty cache, or does not.")
    ] = StartChoice.COLD,
    layer: Annotated[int | None, typer.Option(min=0, help="This layer alone.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="This policy; repeatable [default: all].")
    ] = None,
    sizes: Annotated[
        int, typer.Option(min=2, help="Numbers of slots in the table and for one-size policies.")
    ] = 12,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Only so many sequences, from the first.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG to write [default: curve-NAME.png].")
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Print only.")] = False,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every point, by layer.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Hit rate against slots for every eviction policy, with the knee; no clock, no prefetch.

    The LRU curve holds all layers and all sizes of one pass over the routes.
    """
    routes = _routes(trace, sequences)
    _check_layer(routes, layer)
    slots = _slots(routes, lookups.value, sizes)
    found = _curves(routes, lookups.value, between.value, policy, slots)
    conditions = _conditions(routes, lookups.value, between.value, layer)
    files = []
    if not no_plot:
        files.append(_plot(found, routes, conditions, layer, plot))
    if csv_file is not None:
        files.append(_write_csv(found, lookups.value, csv_file))
    if as_json:
        print_json(_document(found, routes, lookups.value, between.value, layer, files))
        return
    typer.echo(_text(found, routes, conditions, layer, slots))
    for file in files:
        typer.echo(f"wrote {file}")


def _routes(name: str, sequences: int | None) -> Trace:
    from specter_traces import open_trace

    trace = open_trace(name)
    if sequences is not None and sequences < trace.num_sequences:
        trace = trace.select(range(sequences))
    return trace


def _check_layer(trace: Trace, layer: int | None) -> None:
    from specter_traces.errors import UsageError

    if layer is not None and layer >= trace.num_layers:
        raise UsageError(
            f"trace {trace.header.name!r} has {trace.num_layers} MoE layers, got --layer {layer}: "
            f"choose 0 to {trace.num_layers - 1}"
        )


def _slots(trace: Trace, lookups: str, count: int) -> list[int]:
    from specter_sim.engine.curves import Lookups, sizes_of

    return sizes_of(trace, Lookups(lookups), count)


def _curves(
    trace: Trace, lookups: str, between: str, policies: Sequence[str] | None, sizes: Sequence[int]
) -> list[Curve]:
    from specter_sim.engine.curves import Lookups, cache_curves, policies_of

    way = Lookups(lookups)
    known = policies_of(way)
    for name in policies or ():
        _check_policy(name, known, lookups)
    curves = cache_curves(
        trace,
        way,
        policies,
        sizes=sizes,
        warm=between == "warm",
        workers=os.cpu_count() or 1,
    )
    return list(_with_progress(curves, len(policies or known)))


def _check_policy(name: str, known: Sequence[str], lookups: str) -> None:
    from specter_sim.names import suggestion
    from specter_traces.errors import UsageError

    if name not in known:
        raise UsageError(
            f'no {lookups} curve for policy "{name}": {suggestion(name, known)} '
            f"(a curve needs the target's routes and nothing else: {', '.join(known)})"
        )


def _with_progress(curves: Iterator[Curve], count: int) -> Iterator[Curve]:
    """Say on a terminal which curve is done."""
    import sys

    for number, one in enumerate(curves, 1):
        if sys.stderr.isatty():
            typer.echo(f"{number}/{count} {one.policy}", err=True)
        yield one


def _conditions(trace: Trace, lookups: str, between: str, layer: int | None) -> str:
    where = "all layers" if layer is None else f"layer {layer}"
    start = "each from an empty cache" if between == "cold" else "the cache stays warm between them"
    way = "a token's experts at once" if lookups == "batched" else "one after another"
    return (
        f"{trace.num_positions:,} tokens in {trace.num_sequences} sequences, {start}; "
        f"{lookups} lookups ({way}); {where}; {today()}"
    )


def _text(
    curves: Sequence[Curve], trace: Trace, conditions: str, layer: int | None, places: Sequence[int]
) -> str:
    from specter_sim.report.tables import render

    rates = [dict(zip(c.slots.tolist(), c.hit_rate(layer), strict=True)) for c in curves]
    rows = [[str(slots), *(f"{100 * rate[slots]:.1f} %" for rate in rates)] for slots in places]
    marks = "".join(f" [{mark}]" for mark in trace.header.marks)
    header = trace.header
    return "\n".join(
        [
            f"{header.name} ({header.model}){marks}: {header.num_layers} layers x "
            f"{header.num_experts} experts, top-{header.top_k}",
            conditions,
            "",
            render(["slots", *(c.policy for c in curves)], rows),
            "",
            *(_knee_line(c, layer) for c in curves if c.policy in ("lru", "belady")),
            f"knee: {KNEE}",
        ]
    )


def _knee_line(one: Curve, layer: int | None) -> str:
    knee = one.knee(layer)
    return f"{one.policy}: knee at {one.slots[knee]} slots, {one.hit_rate(layer)[knee]:.1%} hits"


def _plot(
    curves: Sequence[Curve], trace: Trace, conditions: str, layer: int | None, path: Path | None
) -> Path:
    from specter_sim.report.curve_plots import plot_curves

    # A name comes out of a file: it must not choose another folder.
    safe = re.sub(r"[^\w.-]+", "-", trace.header.name).strip(".") or "unnamed"
    file = Path(f"curve-{safe}.png") if path is None else path
    return plot_curves(curves, trace.header, conditions, layer, file)


def _write_csv(curves: Sequence[Curve], lookups: str, path: Path) -> Path:
    from specter_traces.files import write_atomic

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["policy", "lookups", "layer", "slots", "hits", "demands", "hit_rate"])
    for one in curves:
        for layer, hits in enumerate(one.hits.tolist()):
            for slots, count in zip(one.slots.tolist(), hits, strict=True):
                rate = count / one.lookups
                writer.writerow([one.policy, lookups, layer, slots, count, one.lookups, rate])
    return write_atomic(path, text.getvalue().encode())


def _document(
    curves: Sequence[Curve],
    trace: Trace,
    lookups: str,
    between: str,
    layer: int | None,
    files: Sequence[Path],
) -> dict[str, Any]:
    header = trace.header
    return {
        "trace": header.name,
        "content_hash": header.content_hash,
        "model": header.model,
        "marks": list(header.marks),
        "tokens": trace.num_positions,
        "sequences": trace.num_sequences,
        "lookups": lookups,
        "between": between,
        "layer": layer,
        "date": today(),
        "knee_method": KNEE,
        "curves": [_curve_document(one, layer) for one in curves],
        "files": [str(file) for file in files],
    }


def _curve_document(one: Curve, layer: int | None) -> dict[str, Any]:
    knee = one.knee(layer)
    hits = one.hits.sum(axis=0) if layer is None else one.hits[layer]
    return {
        "policy": one.policy,
        "slots": one.slots.tolist(),
        "hits": hits.tolist(),
        "demands": one.lookups * (len(one.hits) if layer is None else 1),
        "hit_rate": one.hit_rate(layer).tolist(),
        "knee": {"slots": int(one.slots[knee]), "hit_rate": float(one.hit_rate(layer)[knee])},
        "knee_of_layer": [int(one.slots[one.knee(i)]) for i in range(len(one.hits))],
    }
