"""`specter-sim compare`: the presets against each other, at equal memory and at equal slots."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from specter_sim.cli.options import (
    BudgetOption,
    ConfigArgument,
    EngineOption,
    JsonOption,
    MachineOption,
    ModelOption,
    OutOption,
    SetOption,
    SlotsOption,
    TokensOption,
    TraceOption,
    WorkersOption,
    layers,
    print_json,
    tell,
    today,
)
from specter_sim.cli.sweep import progress_bar
from specter_sim.config import Table, build, content_hash, parse_value
from specter_sim.names import suggestion
from specter_sim.presets import PRESETS
from specter_sim.report.rows import Row, conditions, value_text
from specter_sim.report.tables import marks, results_table
from specter_sim.report.verdict import judge
from specter_sim.results import Engine
from specter_sim.sweep.executor import default_workers, run_tasks
from specter_sim.sweep.plan import Task
from specter_sim.sweep.store import Record, Store, flat_row
from specter_traces.errors import SpecterError, UsageError

YARDSTICK = "on-demand-lru"  # its slots are the equal slots, where none are given


def compare(
    config: ConfigArgument = None,
    settings: SetOption = None,
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help="Only this preset; may be repeated.")
    ] = None,
    model: ModelOption = None,
    trace: TraceOption = None,
    machine: MachineOption = None,
    budget: BudgetOption = None,
    slots: SlotsOption = None,
    tokens: TokensOption = None,
    out: OutOption = None,
    workers: WorkersOption = None,
    engine: EngineOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rank the presets at equal device memory, and beside it at equal slots."""
    names = _chosen(presets)
    shortcuts = {
        "model": model,
        "trace.path": trace,
        "machine.name": machine,
        "trace.tokens": tokens,
    }
    base = layers(config, settings, shortcuts)
    memory_bytes, slots_each = _limits(base, budget, slots)
    systems = {
        "equal memory": _systems(base, names, {"slots": "none", "budget": memory_bytes}),
        "equal slots": _systems(base, names, {"budget": "none", "slots": slots_each}),
    }
    tasks = {task.key: task for found in systems.values() for task in found.values()}
    records = _computed(list(tasks.values()), out, workers, engine)
    told = {title: _ranked(found, records) for title, found in systems.items()}
    if as_json:
        limits = {"budget_bytes": memory_bytes, "slots": slots_each}
        print_json({"date": today(), **limits, "rankings": told, "verdicts": _verdicts(told)})
        return
    _print(told, memory_bytes, slots_each)


def _chosen(presets: Sequence[str] | None) -> list[str]:
    for name in presets or ():
        if name not in PRESETS:
            raise UsageError(f'unknown preset "{name}": {suggestion(name, PRESETS)}')
    return list(presets or PRESETS)


def _limits(base: list[Table], budget: str | None, slots: str | None) -> tuple[int, int]:
    """The device bytes and the slots a layer that are equal, from one of them or the machine.

    Slots alone mean the memory that the yardstick preset needs for them; a budget alone the slots
    that it gives the yardstick. Given both, each is taken as it is.
    """
    from specter_sim.setup import resolve

    given = build(*base).memory
    if budget is not None and slots is not None:
        memory_bytes = build(*base, {"memory": {"budget": budget}}).memory.budget
        each = build(*base, {"memory": {"slots": parse_value(slots)}}).memory.slots
        if memory_bytes is None or each is None:
            raise UsageError('--slots and --budget need a number each: leave out "none"')
        return memory_bytes, each
    yardstick = {"preset": YARDSTICK}
    if budget is not None or (slots is None and given.slots is None):
        limit: Table = {"memory": {"budget": budget}} if budget is not None else {}
        found = resolve(build(*base, yardstick, limit))
        memory_bytes = build(*base, limit).memory.budget or found.machine.gpu.memory_bytes
    else:
        limit = {"memory": {"slots": parse_value(slots)}} if slots is not None else {}
        found = resolve(build(*base, yardstick, limit))
        memory_bytes = found.plan.total_bytes
    return memory_bytes, max(1, found.plan.slots // found.shape.moe_layers)


def _systems(base: list[Table], names: Sequence[str], memory: Table) -> dict[str, Task]:
    from specter_sim import __version__
    from specter_sim.sweep.evaluate import inputs_of

    found = {}
    for name in names:
        # In rounds if need be: the paper's own settings have fewer slots than a token's experts.
        config = build(*base, {"preset": name}, {"memory": {"allow_rounds": True, **memory}})
        key = content_hash(config, inputs_of(config), __version__)
        found[name] = Task(key, config)
    return found


def _computed(
    tasks: list[Task], out: Path | None, workers: int | None, engine: Engine | None
) -> dict[str, Record]:
    from specter_sim.sweep.engines import local

    compute = local(workers or default_workers(), engine, tell)
    with tempfile.TemporaryDirectory() as temporary, Store(out or Path(temporary)) as store:
        with progress_bar() as progress:
            outcome = run_tasks(tasks, compute, store, progress, len(tasks))
        if not outcome.has_results:
            raise SpecterError(f"no preset could run: {outcome.first_error}")
        return {record["key"]: record for record in store.records(outcome.keys)}


def _ranked(systems: dict[str, Task], records: dict[str, Record]) -> list[Row]:
    """One row a preset, the fastest first, those that cannot run last with their reason."""
    rows = [flat_row(records[task.key]) | {"preset": name} for name, task in systems.items()]
    return sorted(rows, key=lambda row: (row.get("tpot_s") is None, row.get("tpot_s") or 0.0))


def _verdicts(told: dict[str, list[Row]]) -> list[str]:
    """For every preset that drafts, whether it beats the best one that does not."""
    rows = [row for row in told["equal memory"] if row.get("tpot_s") is not None]
    plain = next((row for row in rows if row["policy.depth"] == "never"), None)
    if plain is None:
        return []
    drafting = [row for row in rows if row["policy.depth"] != "never"]
    best = plain["preset"]
    return [f"{row['preset']} against {best}: {judge(row, plain).text}" for row in drafting]


def _print(told: dict[str, list[Row]], memory_bytes: int, slots: int) -> None:
    every = [row for rows in told.values() for row in rows]
    ran = [row for row in every if "error" not in row]
    typer.echo(conditions(ran, today()))
    limits = {
        "equal memory": value_text("memory.budget", memory_bytes),
        "equal slots": f"{slots} a layer",
    }
    for title, rows in told.items():
        typer.echo(f"\nat {title}: {limits[title]}\n")
        shown = [row for row in rows if "error" not in row]
        labels = {"preset": _preset, "slots": _slots}
        if shown:
            typer.echo(results_table(shown, labels))
        for row in rows:
            if "error" in row:
                typer.echo(f"{row['preset']} cannot run: {row['error']}")
    for verdict in _verdicts(told):
        typer.echo(f"\n{verdict}")
    for mark in dict.fromkeys(mark for row in ran for mark in marks(row)):
        typer.echo(f"\nnote: {mark}")


def _preset(row: Row) -> str:
    return str(row["preset"])


def _slots(row: Row) -> str:
    return f"{float(row['slots_per_layer']):.1f}"
