"""`specter-sim trace`: look at router traces, check them, import and synthesize them."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from specter_traces import Trace
    from specter_traces.importers import Origin
    from specter_traces.summary import Summary

app = typer.Typer(no_args_is_help=True, help="Look at router traces, check, import, synthesize.")

TraceArgument = Annotated[str, typer.Argument(metavar="TRACE", help="Bundled name or file.")]
OutOption = Annotated[Path, typer.Option("--out", help="File to write (.safetensors).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the random numbers.")]


_LOOPS = 0.3
"""Repeated share of a sequence above which its text is called looping."""


class LogFormat(StrEnum):
    """Logs that `import` reads."""

    NPZ = "npz"
    ROUTED_EXPERTS = "routed-experts"
    LLAMACPP = "llamacpp"
    JSONL = "jsonl"


@app.command("list")
def list_traces(as_json: JsonOption = False) -> None:
    """List the bundled traces."""
    from specter_traces import bundled, bundled_names

    traces = [bundled(name) for name in bundled_names()]
    if as_json:
        typer.echo(json.dumps([_identity(trace) for trace in traces], indent=2))
        return
    table = _table("bundled traces", "name", "model", "shape", "positions", "draft", "marks")
    for trace in traces:
        draft = trace.header.draft
        table.add_row(
            trace.header.name,
            trace.header.model,
            _shape(trace),
            f"{trace.num_positions:,}",
            f"{draft.name}" if draft else "none",
            ", ".join(trace.header.marks),
        )
    _print(table)


@app.command()
def info(
    trace: TraceArgument,
    plots: Annotated[
        Path | None, typer.Option(help="Folder of the plots [default: trace-NAME].")
    ] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="Print only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print and plot what a trace holds: popularity, locality, union growth, draft fidelity."""
    from specter_traces import open_trace
    from specter_traces.summary import summarize

    summary = summarize(open_trace(trace))
    files = [] if no_plots else _plot(summary, plots)
    if as_json:
        document = {**summary.as_json(), "plots": [str(file) for file in files]}
        typer.echo(json.dumps(document, indent=2))
        return
    for table in _info_tables(summary):
        _print(table)
    for file in files:
        typer.echo(f"wrote {file}")


@app.command()
def validate(trace: TraceArgument, as_json: JsonOption = False) -> None:
    """Check every invariant of a trace; exit 1 when one is broken."""
    from specter_traces import examine, find_trace

    loaded, problems = examine(find_trace(trace))
    if as_json:
        document = {**_identity(loaded), "problems": [vars(problem) for problem in problems]}
        typer.echo(json.dumps(document, indent=2))
    elif problems:
        table = _table(f"{trace}: {len(problems)} problems", "column", "what", "got", "expected")
        for problem in problems:
            table.add_row(problem.column, problem.what, problem.got, problem.expected)
        _print(table)
    else:
        marks = "".join(f" [{mark}]" for mark in loaded.header.marks)
        typer.echo(f"{trace}: sound{marks}, {_shape(loaded)}, {loaded.num_positions:,} positions")
    raise typer.Exit(1 if problems else 0)


@app.command("import")
def import_log(
    log_format: Annotated[LogFormat, typer.Argument(metavar="FORMAT", help="Kind of log.")],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The log, or its folder for npz.")],
    out: OutOption,
    name: Annotated[str, typer.Option(help="Name of the trace [default: PATH's].")] = "",
    model: Annotated[str, typer.Option(help="Model that was recorded.")] = "unknown",
    experts: Annotated[
        int, typer.Option(help="Routed experts a layer [default: largest id + 1].", min=0)
    ] = 0,
    source: Annotated[str, typer.Option(help="Where the log is from.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of the log.")] = "",
    dataset: Annotated[
        list[str] | None, typer.Option(help="npz: take this data set only; repeatable.")
    ] = None,
    unclean: Annotated[
        bool, typer.Option("--unclean", help="npz: also unfinished or repetitive sequences.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="npz: the first so many sequences.")] = None,
) -> None:
    """Turn somebody's routing log into a trace; logs that cannot be trusted are refused."""
    from specter_traces import save
    from specter_traces.importers import Origin, import_npz_folder

    origin = Origin(
        name or path.stem, model, experts, source, licence, f"specter-sim trace import {log_format}"
    )
    if log_format is LogFormat.NPZ:
        trace = import_npz_folder(
            path, origin, datasets=dataset or (), clean=not unclean, limit=limit
        )
    else:
        _refuse_npz_options(dataset, unclean, limit)
        trace = _import_file(log_format, path, origin)
    _report(save(trace, out), out)


@app.command()
def synth(
    trace: TraceArgument,
    out: OutOption,
    layers: Annotated[int | None, typer.Option(help="MoE layers.")] = None,
    experts: Annotated[int | None, typer.Option(help="Routed experts a layer.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts a token.")] = None,
    like: Annotated[str | None, typer.Option(help="Take the shape of this model.")] = None,
    tokens: Annotated[int, typer.Option(help="Positions in all.")] = 2000,
    seed: SeedOption = 0,
) -> None:
    """Emit another shape with a trace's kind of routing, marked synthetic."""
    from specter_traces import open_trace, save
    from specter_traces.synthesize import synthesize

    shape = _wanted_shape(like, layers, experts, top_k)
    _report(save(synthesize(open_trace(trace), *shape, tokens, seed), out), out)


@app.command()
def assume(
    trace: TraceArgument,
    out: OutOption,
    acceptance: Annotated[float, typer.Option(help="Mean chance that a proposal is kept.")] = 0.9,
    recall: Annotated[float, typer.Option(help="Share of needed experts the draft names.")] = 0.95,
    seed: SeedOption = 0,
) -> None:
    """Attach a draft that nobody recorded to a trace without one, marked as assumed."""
    from specter_traces import open_trace, save
    from specter_traces.synthesize import with_assumed_draft

    paired = with_assumed_draft(open_trace(trace), acceptance, recall, seed)
    _report(save(paired, out), out)


def _import_file(log_format: LogFormat, path: Path, origin: Origin) -> Trace:
    from specter_traces import importers

    readers = {
        LogFormat.ROUTED_EXPERTS: importers.import_routed_experts,
        LogFormat.LLAMACPP: importers.import_llamacpp_csv,
        LogFormat.JSONL: importers.import_jsonl,
    }
    return readers[log_format](path, origin)


def _refuse_npz_options(dataset: list[str] | None, unclean: bool, limit: int | None) -> None:
    from specter_traces import UsageError

    if dataset or unclean or limit is not None:
        raise UsageError("--dataset, --unclean and --limit belong to the npz format")


def _wanted_shape(
    like: str | None, layers: int | None, experts: int | None, top_k: int | None
) -> tuple[int, int, int]:
    from specter_traces import UsageError

    if like is not None:
        from specter_sim.hardware import find_model

        model = find_model(like)
        return (
            model.moe_layers if layers is None else layers,
            model.num_experts if experts is None else experts,
            model.top_k if top_k is None else top_k,
        )
    if layers is None or experts is None or top_k is None:
        raise UsageError("give a shape: --layers, --experts and --top-k, or --like MODEL")
    return layers, experts, top_k


def _plot(summary: Summary, folder: Path | None) -> list[Path]:
    from specter_sim.report.trace_plots import plot_trace

    # A name comes out of a file: it must not choose another folder.
    safe = re.sub(r"[^\w.-]+", "-", summary.header.name).strip(".")[:100] or "unnamed"
    return plot_trace(summary, Path(f"trace-{safe}") if folder is None else folder)


def _report(trace: Trace, out: Path) -> None:
    marks = "".join(f" [{mark}]" for mark in trace.header.marks)
    typer.echo(
        f"wrote {out}{marks}: {_shape(trace)}, {trace.num_positions:,} positions in "
        f"{trace.num_sequences} sequences"
    )


def _shape(trace: Trace) -> str:
    return f"{trace.num_layers} x {trace.num_experts}, top-{trace.top_k}"


def _identity(trace: Trace) -> dict[str, Any]:
    header = trace.header
    return {
        "name": header.name,
        "model": header.model,
        "marks": list(header.marks),
        "num_layers": trace.num_layers,
        "num_experts": trace.num_experts,
        "top_k": trace.top_k,
        "positions": trace.num_positions,
        "sequences": trace.num_sequences,
        "paired": trace.is_paired,
        "content_hash": header.content_hash,
    }


def _info_tables(summary: Summary) -> list[Any]:
    tables = [_header_table(summary), _layer_table(summary), _union_table(summary)]
    if summary.draft is not None:
        tables.append(_draft_table(summary))
    for table in tables[1:]:
        table.title += "".join(
            f" [bold red]{mark}[/]" for mark in map(_escape, summary.header.marks)
        )
    return tables


def _header_table(summary: Summary) -> Any:
    header = summary.header
    title = f"{header.name}: {header.model}"
    table = _table(title, "", "", header=False)
    domains: dict[str, int] = {}
    for sequence in header.sequences:
        domains[sequence.domain or "?"] = domains.get(sequence.domain or "?", 0) + 1
    rows = {
        "MARKED": "[bold red]" + _escape(", ".join(header.marks)) + "[/]" if header.marks else "",
        "shape": f"{header.num_layers} layers x {header.num_experts} experts, top-{header.top_k}",
        "positions": f"{summary.num_positions:,} in {summary.num_sequences} sequences",
        "domains": _escape(", ".join(f"{name} ({count})" for name, count in domains.items())),
        "text": header.decoding.value,
        "repetition": _repetition(summary),
        "precision": _escape(header.precision),
        "draft": _escape(_draft_name(summary)),
        "source": _escape(header.source),
        "licence": _escape(header.licence),
        "made by": _escape(header.created_by),
        "notes": _escape("; ".join(header.notes)),
        "content hash": header.content_hash[:16],
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _draft_name(summary: Summary) -> str:
    draft = summary.header.draft
    if draft is not None:
        return f"{draft.name}: {draft.bits} bits, {draft.kind.value}, group {draft.group_size}"
    return "assumed" if summary.header.assumed_draft else "none"


def _repetition(summary: Summary) -> str:
    known = summary.repetition[summary.repetition == summary.repetition]
    if not known.size:
        return "unknown"
    flag = " [yellow](some text loops: this flatters caches)[/]" if known.max() > _LOOPS else ""
    return f"{known.mean():.1%} repeated, worst sequence {known.max():.1%}{flag}"


def _layer_table(summary: Summary) -> Any:
    table = _table("by layer", "", "mean", "least", "most", "uniform routing")
    top_k, experts = summary.header.top_k, summary.header.num_experts
    quarter = max(1, experts // 4)
    busiest = -summary.popularity
    busiest.sort(axis=1)
    share = -busiest[:, :quarter].sum(axis=1) / top_k
    _add_spread(
        table,
        f"shared with the next token, of {top_k}",
        summary.overlap_by_lag[0],
        f"{summary.uniform_overlap:.2f}",
    )
    _add_spread(table, "entropy (bits)", summary.entropy_bits, f"{_log2(experts):.2f}")
    _add_spread(
        table, f"use that falls on the busiest {quarter}", share, f"{quarter / experts:.2f}"
    )
    if summary.draft is not None:
        _add_spread(table, "draft: recall", summary.draft.recall, f"{top_k / experts:.2f}")
        _add_spread(table, "draft: exact set", summary.draft.exact, "")
    if summary.gate is not None:
        _add_spread(table, "early gate: recall", summary.gate.recall, f"{top_k / experts:.2f}")
        _add_spread(table, "early gate: exact set", summary.gate.exact, "")
    return table


def _union_table(summary: Summary) -> Any:
    table = _table("by distance", "tokens", *[str(n) for n in summary.window_lengths])
    means = summary.union_growth.mean(axis=1)
    uniform = [float(summary.uniform_union(n)) for n in summary.window_lengths]
    table.add_row("experts a layer needs for a window", *[_number(value, 1) for value in means])
    table.add_row("  under uniform routing", *[f"{value:.1f}" for value in uniform])
    return table


def _draft_table(summary: Summary) -> Any:
    assert summary.acceptance is not None
    assert summary.recall_by_distance is not None and summary.survival is not None
    kept = summary.acceptance
    table = _table("draft", "", "")
    table.add_row("acceptance, greedy", _number(kept.greedy, 3))
    table.add_row("acceptance, sampled", _number(kept.sampled, 3))
    table.add_row(
        "recall where accepted / rejected",
        f"{_number(kept.recall_accepted, 3)} / {_number(kept.recall_rejected, 3)}",
    )
    recall = summary.recall_by_distance.mean(axis=1)
    table.add_row("recall by distance in tokens", _pairs(summary.distances, recall))
    table.add_row("windows accepted whole, by depth", _pairs(summary.depths, summary.survival))
    return table


def _pairs(places: tuple[int, ...], values: Any) -> str:
    return "  ".join(
        f"{place}: {_number(value)}" for place, value in zip(places, values, strict=True)
    )


def _add_spread(table: Any, name: str, values: Any, uniform: str) -> None:
    table.add_row(name, *[_number(v) for v in (values.mean(), values.min(), values.max())], uniform)


def _number(value: float, digits: int = 2) -> str:
    """Return a number, or a dash for what the trace is too small to tell."""
    return f"{value:.{digits}f}" if value == value else "-"


def _log2(value: int) -> float:
    import math

    return math.log2(value)


def _escape(text: str) -> str:
    from rich.markup import escape

    from specter_traces.errors import printable

    return escape(printable(text))


def _table(title: str, *columns: str, header: bool = True) -> Any:
    from rich.table import Table

    table = Table(title=_escape(title), title_justify="left", show_header=header)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or not header else "right")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table)
