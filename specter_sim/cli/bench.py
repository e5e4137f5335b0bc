"""`specter-sim bench`: how fast the simulator itself is, on this machine, now."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_sim.cli.options import JsonOption, print_json, today

if TYPE_CHECKING:
    from specter_sim.cli.speed import Speed

PACKAGES = ("numpy", "numba", "simpy", "libcachesim")


def bench(
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of the schedules.")] = 1024,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each; the median counts.")] = 5,
    part: Annotated[
        list[str] | None,
        typer.Option(help="schedule, replay or process; repeatable [default: all]."),
    ] = None,
    peer: Annotated[
        Path | None,
        typer.Option(help="Script that runs libcachesim: benchmarks/libcachesim_peer.py."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure schedule, replays and start-up, each beside its peer in the same run."""
    from specter_sim.cli import speed

    parts = {
        "schedule": lambda: speed.schedule_speeds(tokens, repeats),
        "replay": lambda: speed.replay_speeds(repeats, peer),
        "process": lambda: speed.process_speeds(repeats),
    }
    chosen = _checked(part, list(parts))
    place = _place() | {"load_before": _load()}
    speeds = [one for name in chosen for one in _told(parts[name]())]
    place["load_after"] = _load()
    conditions = {
        "schedule": speed.schedule_conditions(tokens),
        "replay": speed.replay_conditions(),
        "process": "processes: preset specter on the bundled trace",
    }
    shown = [conditions[name] for name in chosen]
    if as_json:
        rows = [vars(one) for one in speeds]
        print_json(place | {"repeats": repeats, "conditions": shown, "speeds": rows})
        return
    typer.echo(_text(place, repeats, shown, speeds))


def _checked(wanted: list[str] | None, known: list[str]) -> list[str]:
    from specter_sim.names import suggestion
    from specter_traces.errors import UsageError

    for name in wanted or ():
        if name not in known:
            raise UsageError(f'no part "{name}" of the benchmark: {suggestion(name, known)}')
    return known if not wanted else [name for name in known if name in wanted]


def _told(speeds: "Iterable[Speed]") -> "Iterable[Speed]":
    """Say what is done as it is done."""
    for one in speeds:
        typer.echo(f"measured: {one.what}", err=True)
        yield one


def _text(place: dict[str, Any], repeats: int, conditions: list[str], speeds: "list[Speed]") -> str:
    from specter_sim.report.tables import render

    rows = [
        [one.what, _number(one.value, one.unit), _goal(one), one.peer, _peer(one), _ratio(one)]
        for one in speeds
    ]
    versions = ", ".join(f"{name} {number}" for name, number in place["versions"].items())
    head = ["what", "measured", "goal", "beside", "its rate", "times faster"]
    return "\n".join(
        [
            f"{place['machine']}, {place['cores']} cores, {place['date']}; {versions}",
            f"one core, medians of {repeats} runs, CPU time (processes: wall clock); load average "
            f"before {place['load_before']}, after {place['load_after']}",
            *conditions,
            "",
            render(head, rows),
        ]
    )


def _number(value: float, unit: str) -> str:
    if unit == "s":
        return f"{value:.2f} s"
    return f"{value / 1e6:.3g} M {unit}" if value >= 1e5 else f"{value:,.0f} {unit}"


def _goal(one: "Speed") -> str:
    if one.goal is None:
        return "-"
    sign, reached = (
        ("<=", one.value <= one.goal)
        if one.unit == "s"
        else (
            ">=",
            one.value >= one.goal,
        )
    )
    amount = f"{one.goal:g} s" if one.unit == "s" else f"{one.goal / 1e6:g} M"
    return f"{sign} {amount}: {'reached' if reached else 'missed'}"


def _peer(one: "Speed") -> str:
    return "-" if one.peer_value is None else _number(one.peer_value, one.unit)


def _ratio(one: "Speed") -> str:
    if one.ratio is None:
        return "-"
    goal = "" if one.ratio_goal is None else f" (goal {one.ratio_goal:g})"
    return f"{one.ratio:.3g}{goal}"


def _place() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "date": today(),
        "versions": versions,
    }


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if "model name" in line)
            return next(names, platform.processor() or platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
