"""`specter-run bench`: policies at equal device memory, measured over prompts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_runtime.cli.options import (
    ConfigOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    SetOption,
    System,
    TemperatureOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
    VramOption,
    check_count,
    configuration,
    print_json,
    sampling_of,
    tell,
    today,
)
from specter_runtime.cli.systems import DRAFTED, PLAIN
from specter_traces.errors import SpecterError, UsageError

if TYPE_CHECKING:
    from specter_runtime.cli.bench_rows import Rows
    from specter_runtime.cli.workbench import Work, Workbench

Row = Mapping[str, Any]

POLICIES = (
    "layer-streaming",
    "on-demand-lru",
    "next-layer-gate",
    "paper-artifact",
    PLAIN,
    DRAFTED,
    "coded-lru",
    "specter",
)
"""What is compared when nobody says what."""

AS_CONFIGURED = "as-configured"
"""The policy that names what a configuration file says, or nothing where it says nothing."""

_REPETITIVE = 0.2


def bench(
    model: ModelArgument = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="A preset, plain, plain-drafted or as-configured; may be repeated."
        ),
    ] = None,
    vram: VramOption = None,
    links: Annotated[
        list[str] | None,
        typer.Option("--link", help="Bandwidth of the emulated link; may be repeated."),
    ] = None,
    prompts: Annotated[
        str, typer.Option(help="Prompts to continue: a bundled set or a .jsonl/.txt file.")
    ] = "starters",
    sequences: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens to write after a prompt.")] = 64,
    config: ConfigOption = None,
    settings: SetOption = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "emulated",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV file of the rows; those it has are not run again."),
    ] = None,
    predict: Annotated[
        bool,
        typer.Option("--predict/--no-predict", help="Also tell what the simulator expects."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Compare policies at equal device memory.

    The draft's bytes are charged. Without --vram the memory is what half of the experts need beside
    the rest, without a draft.
    """
    from specter_runtime.cli.files import check_writable
    from specter_runtime.cli.workbench import Work
    from specter_runtime.prompts import read_passages

    check_count("--new-tokens", new_tokens)
    check_count("--sequences", sequences)
    check_writable(out)
    base = System(
        model,
        config,
        vram=vram,
        settings=tuple(settings or ()),
        device=device,
        dtype=dtype,
        threads=threads,
    )
    passages = read_passages(prompts)[:sequences]
    sampling = sampling_of(temperature, top_k, top_p, seed)
    work = Work(passages, prompts, new_tokens, sampling, predict)
    _run(base, policies or POLICIES, links or [None], work, out, as_json)


def _run(
    base: System,
    policies: Sequence[str],
    links: Sequence[str | None],
    work: Work,
    out: Path | None,
    as_json: bool,
) -> None:
    from specter_runtime.cli.bench_rows import Rows
    from specter_runtime.cli.workbench import Workbench

    systems = _systems(base, policies, links)
    rows = Rows(out)
    with closing(Workbench(base, work)) as bench:
        told, interrupted = _measured(_at_equal_memory(systems, bench), bench, rows)
    if as_json:
        print_json({"date": today(), "work": work.describe(), "rows": told})
    elif told:
        typer.echo(_table(told, work))
    if interrupted:
        raise KeyboardInterrupt
    if all(row["error"] for row in told):
        raise SpecterError(f"no policy could run: {told[0]['error']}")


def _systems(base: System, policies: Sequence[str], links: Sequence[str | None]) -> list[System]:
    """One system a policy and link; UsageError before anything is loaded."""
    from specter_runtime.checkpoint import find_folder

    systems = [
        replace(base, policy=None if policy == AS_CONFIGURED else policy, link=link)
        for link in dict.fromkeys(links)
        for policy in dict.fromkeys(policies)
    ]
    configs = [configuration(system) for system in systems]
    find_folder(configs[0].model)
    if any(config.memory.slots or config.memory.slots_per_layer for config in configs):
        raise UsageError("a bench compares at equal memory: give --vram instead of slots")
    return systems


def _at_equal_memory(systems: list[System], bench: Workbench) -> list[System]:
    if configuration(systems[0]).memory.budget is not None:
        return systems
    vram = f"{bench.half_resident_bytes()} B"
    return [replace(system, vram=vram) for system in systems]


def _measured(systems: Sequence[System], bench: Workbench, rows: Rows) -> tuple[list[Row], bool]:
    """One row a system; True when Ctrl-C ended it early."""
    told: list[Row] = []
    for number, system in enumerate(systems, start=1):
        link = "" if system.link is None else f", link {system.link}"
        place = f"{number} of {len(systems)}: {system.policy or AS_CONFIGURED}{link}"
        try:
            told.append(_row(system, bench, rows, place))
        except KeyboardInterrupt:
            return told, True
    return told, False


def _row(system: System, bench: Workbench, rows: Rows, place: str) -> Row:
    config = configuration(system)
    about = bench.about(system, config)
    done = rows.find(about["key"])
    if done is not None:
        tell(f"{place}: done before")
        return done
    tell(place)
    try:
        return rows.add(about | bench.measure(config))
    except SpecterError as error:
        return rows.add({**about, "error": str(error)})


def _table(rows: Sequence[Row], work: Work) -> str:
    from specter_runtime.cli.summary import COLUMNS, block, threads
    from specter_sim.report.tables import render
    from specter_sim.units import format_bytes

    first = rows[0]
    parts = (
        Path(str(first["model"])).name,
        f"{format_bytes(first['budget_bytes'])} of device memory, {first['device']}",
        work.describe(),
        threads(int(first["threads"])),
        str(first["date"]),
    )
    ran = [row for row in rows if not row["error"]]
    lines = [block([("conditions", " · ".join(parts))]), ""]
    if ran:
        columns = _columns(ran)
        lines.append(
            render(list(columns), [[cell(row) for cell in columns.values()] for row in ran])
        )
    lines.append("")
    lines += [textwrap.fill(text, COLUMNS) for text in (*_obstacles(rows), *_warnings(ran))]
    return "\n".join(lines).rstrip()


def _obstacles(rows: Sequence[Row]) -> list[str]:
    return [f"{row['policy']} cannot run: {row['error']}" for row in rows if row["error"]]


def _warnings(rows: Sequence[Row]) -> list[str]:
    worst = max((row["repetition"] for row in rows), default=0.0)
    if worst <= _REPETITIVE:
        return []
    return [
        f"note: up to {worst:.0%} of the 8-grams are repeats, and a looping text flatters every "
        "cache: sample (--temperature 0.8)"
    ]


def _columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Beside a prediction there is no room for the number of slots."""
    if not any(row["predicted_tpot_s"] for row in rows):
        return {**_MEASURED, "slots": lambda row: f"{row['slots_per_layer']:.1f}"}
    policy, link, tpot, *others = _MEASURED
    return {
        **{name: _MEASURED[name] for name in (policy, link, tpot)},
        "predicted": _time("predicted_tpot_s"),
        **{name: _MEASURED[name] for name in others},
    }


def _link(row: Row) -> str:
    from specter_sim.units import format_rate

    rate = row["link_bytes_per_s"]
    return "-" if rate is None else format_rate(rate)


def _time(key: str) -> Callable[[Row], str]:
    from specter_sim.units import format_time

    return lambda row: "-" if row[key] is None else format_time(row[key])


def _size(row: Row) -> str:
    from specter_sim.units import format_bytes

    return format_bytes(row["bytes_per_token"])


def _share(key: str) -> Callable[[Row], str]:
    return lambda row: f"{100 * row[key]:.0f} %"


_MEASURED: dict[str, Callable[[Row], str]] = {
    "policy": lambda row: str(row["policy"]),
    "link": _link,
    "TPOT": _time("tpot_s"),
    "B/token": _size,
    "hits": _share("hit_rate"),
    "accept": lambda row: _share("acceptance")(row) if row["mean_depth"] else "-",
    "stalled": _share("stall_share"),
}
