"""`specter-sim policies`: the rules and presets by name, with their parameters and sources."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from specter_sim.cli.options import JsonOption, print_json
from specter_sim.names import suggestion
from specter_sim.policies import DEPTH, EVICTION, PREFETCH, PolicyInfo
from specter_sim.presets import PRESETS, Preset
from specter_sim.report.tables import render
from specter_traces.errors import UsageError

KINDS: dict[str, Mapping[str, PolicyInfo]] = {
    "eviction": EVICTION,
    "prefetch": PREFETCH,
    "depth": DEPTH,
}


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A policy or preset to show.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List policies and presets, or show one.

    A policy of your own is a Python function in an installed module or a file of the current
    folder: --set policy.eviction=my_module:my_rule takes (state, index) and returns a number, and
    the expert with the smallest goes. A prefetch or depth policy is a PrefetchRule or a DepthRule;
    an EvictionInfo, PrefetchInfo or DepthInfo declares parameters too. They run on the SimPy
    engine, which is slower.
    """
    if name is not None:
        _show(name, as_json)
    elif as_json:
        print_json(
            {
                **{
                    kind: [_document(kind, info) for info in KINDS[kind].values()] for kind in KINDS
                },
                "presets": [_preset_document(preset) for preset in PRESETS.values()],
            }
        )
    else:
        _list()


def _list() -> None:
    for kind, infos in KINDS.items():
        rows = [[info.name, ", ".join(info.params), info.summary] for info in infos.values()]
        typer.echo(render([kind, "parameters", "what it does"], rows) + "\n")
    rows = [[preset.name, preset.summary] for preset in PRESETS.values()]
    typer.echo(render(["preset", "what it is"], rows))
    typer.echo("\n`specter-sim policies NAME` shows parameters, needs and sources.")


def _show(name: str, as_json: bool) -> None:
    found = [(kind, infos[name]) for kind, infos in KINDS.items() if name in infos]
    preset = PRESETS.get(name)
    if not found and preset is None:
        known = [*(known for infos in KINDS.values() for known in infos), *PRESETS]
        raise UsageError(f'unknown policy or preset "{name}": {suggestion(name, known)}')
    if as_json:
        documents = [_document(kind, info) for kind, info in found]
        print_json(documents + ([_preset_document(preset)] if preset else []))
        return
    parts = ["\n".join(_policy_lines(kind, info)) for kind, info in found]
    parts += ["\n".join(_preset_lines(preset))] if preset else []
    typer.echo("\n\n".join(parts))


def _policy_lines(kind: str, info: PolicyInfo) -> Iterator[str]:
    yield from textwrap.wrap(f"{kind} {info.name}: {info.summary}", 100)
    if info.source:
        yield f"source: {info.source}"
    if info.needs:
        yield f"needs: {', '.join(sorted(info.needs))}"
    for name, param in info.params.items():
        least = "" if param.least is None else f", at least {param.least:g}"
        most = "" if param.most is None else f", at most {param.most:g}"
        yield f"policy.{kind}_params.{name} = {param.default!r}: {param.doc}{least}{most}"


def _preset_lines(preset: Preset) -> Iterator[str]:
    yield from textwrap.wrap(f"preset {preset.name}: {preset.summary}", 100)
    if preset.source:
        yield f"source: {preset.source}"
    for key, value in preset.overrides.items():
        yield f"{key} = {value!r}"


def _document(kind: str, info: PolicyInfo) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": info.name,
        "summary": info.summary,
        "source": info.source,
        "needs": sorted(info.needs),
        "params": {name: dataclasses.asdict(param) for name, param in info.params.items()},
    }


def _preset_document(preset: Preset) -> dict[str, Any]:
    return {
        "kind": "preset",
        "name": preset.name,
        "summary": preset.summary,
        "source": preset.source,
        "overrides": dict(preset.overrides),
    }
