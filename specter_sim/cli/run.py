"""`specter-sim run`: one configuration, everything it comes to, and whether speculation pays."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from specter_sim.cli.options import (
    BudgetOption,
    ConfigArgument,
    DepthOption,
    EngineOption,
    JsonOption,
    MachineOption,
    ModelOption,
    PresetOption,
    SetOption,
    SlotsOption,
    TokensOption,
    TraceOption,
    configuration,
    print_json,
    today,
)
from specter_sim.config import RunConfig, flatten, resolved
from specter_sim.results import Engine
from specter_traces.errors import UsageError, shown

MOST_DIGITS = 30  # of a stretch of tokens


def run(
    config: ConfigArgument = None,
    settings: SetOption = None,
    preset: PresetOption = None,
    model: ModelOption = None,
    trace: TraceOption = None,
    machine: MachineOption = None,
    slots: SlotsOption = None,
    budget: BudgetOption = None,
    depth: DepthOption = None,
    tokens: TokensOption = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline that ui.perfetto.dev opens."),
    ] = None,
    timeline_tokens: Annotated[
        str, typer.Option(metavar="FIRST:LAST", help="Committed tokens the timeline covers.")
    ] = "0:32",
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate one configuration and say what it comes to."""
    shortcuts = {
        "model": model,
        "trace.path": trace,
        "machine.name": machine,
        "memory.slots": slots,
        "memory.budget": budget,
        "policy.depth": depth,
        "trace.tokens": tokens,
    }
    chosen = configuration(config, settings, shortcuts, preset)
    stretch = _stretch(timeline_tokens)
    row = row_of(chosen, Engine.SIMPY if timeline else engine)
    if timeline:
        row = _noted(row, "run on the SimPy engine, which draws timelines")
    speculation = speculation_of(chosen, row, engine)
    written = _write_timeline(timeline, chosen, row, stretch) if timeline else None
    if as_json:
        told = {"date": today(), "config": resolved(chosen), "result": result_part(row)}
        print_json(told | {"speculation": speculation, "timeline": written and str(written)})
        return
    _print(row, speculation["text"])
    if written:
        typer.echo(f"wrote {written}")


def row_of(config: RunConfig, engine: Engine | None = None) -> dict[str, Any]:
    """The row of one configuration: its keys and its result.

    By the engine that answers first, unless one is asked for.
    """
    from specter_sim.sweep.engines import evaluate_once

    table = resolved(config)
    return flatten(table) | evaluate_once(config, engine)


def _noted(row: dict[str, Any], note: str) -> dict[str, Any]:
    return row | {"notes": "; ".join(filter(None, [str(row["notes"]), note]))}


def result_part(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a row, without the configuration."""
    return {key: value for key, value in row.items() if "." not in key and key not in _NOT_METRICS}


_NOT_METRICS = ("model", "preset")


def speculation_of(
    config: RunConfig, row: Mapping[str, Any], engine: Engine | None = None
) -> dict[str, Any]:
    """Whether speculation pays for a configuration that has been run, from its twin's run."""
    from specter_sim.report.verdict import judge
    from specter_sim.sweep.twin import drafts, twin_of

    twin = twin_of(config, row["device_bytes"])
    try:
        other = row_of(twin, engine)
    except UsageError as error:
        return {"pays": None, "speedup": None, "text": f"no verdict on speculation: {error}"}
    with_draft, without = (row, other) if drafts(config) else (other, row)
    verdict = judge(with_draft, without)
    prefix = "" if drafts(config) else "this run does not draft; if it did: "
    return {"pays": verdict.pays, "speedup": verdict.speedup, "text": f"{prefix}{verdict.text}"}


def _print(row: dict[str, Any], verdict: str) -> None:
    from specter_sim.report.rows import conditions, depth_label, policy_label
    from specter_sim.report.tables import describe

    policy = f"{policy_label(row, _POLICY_PARTS)}, depth {depth_label(row)}"
    typer.echo(f"{conditions([row], today())}\n{policy}\n")
    typer.echo(describe(row))
    typer.echo(f"\n{verdict}")


_POLICY_PARTS = ("policy.eviction", "policy.prefetch", "experts.form")


def _stretch(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    plain = len(text) <= MOST_DIGITS and first.isdecimal() and last.isdecimal()
    if not (plain and int(first) < int(last)):
        raise UsageError(f"--timeline-tokens {shown(text)} is not a stretch: write it like 0:32")
    return int(first), int(last)


def _write_timeline(
    path: Path, config: RunConfig, row: dict[str, Any], stretch: tuple[int, int]
) -> Path:
    from specter_sim.report.rows import conditions
    from specter_sim.report.timeline import spans_of_tokens, write_timeline

    spans = spans_of_tokens(config, *stretch)
    return write_timeline(path, spans, {"conditions": conditions([row], today())})
