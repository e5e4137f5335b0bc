"""Options that several verbs share, and the configuration they describe together."""

import json
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from specter_sim.config import (
    LIMITS,
    RunConfig,
    Table,
    build,
    load_table,
    nest,
    parse_settings,
    parse_value,
)
from specter_sim.results import Engine
from specter_traces.errors import UsageError

ConfigArgument = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.toml]", help="Configuration; default: built in.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set memory.slots=12."),
]
PresetOption = Annotated[
    str | None, typer.Option(help="A complete system by name; see `specter-sim policies`.")
]
ModelOption = Annotated[str | None, typer.Option(help="Model name, config.json, or folder.")]
TraceOption = Annotated[
    str | None, typer.Option(help="Bundled trace, a file, or 'synth' for the model's shape.")
]
MachineOption = Annotated[str | None, typer.Option(help="Machine name or TOML file.")]
SlotsOption = Annotated[str | None, typer.Option(help="Slots per MoE layer.")]
BudgetOption = Annotated[str | None, typer.Option(help='Device memory for all: "24 GiB".')]
DepthOption = Annotated[
    str | None, typer.Option(help="Lookahead depth: a number, never, governor, profile.")
]
TokensOption = Annotated[str | None, typer.Option(help="Tokens to decode.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, last.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Folder of the results.")
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, max=4096, help="Threads or processes that compute [default: all cores]."),
]
EngineOption = Annotated[
    Engine | None,
    typer.Option(help="compiled, or simpy: the reference [default: compiled, once it is ready]."),
]


def configuration(
    path: Path | None,
    settings: list[str] | None,
    shortcuts: Mapping[str, str | None],
    preset: str | None = None,
) -> RunConfig:
    """The configuration of a file, under a preset, under shortcuts, under `--set`."""
    return build(*layers(path, settings, shortcuts, preset))


def layers(
    path: Path | None,
    settings: list[str] | None,
    shortcuts: Mapping[str, str | None],
    preset: str | None = None,
) -> list[Table]:
    """The layers of `configuration`, lowest first."""
    table = load_table(path) if path else {}
    if "axes" in table:
        raise UsageError(f"{path} is a sweep file: use specter-sim sweep {path}")
    given = {key: parse_value(text) for key, text in shortcuts.items() if text is not None}
    named: Table = {} if preset is None else {"preset": preset}
    asked = [nest(given), parse_settings(settings or [])]
    _refuse_two_limits(asked)
    return [table, named, *asked]


def _refuse_two_limits(asked: list[Table]) -> None:
    """One command line gives one memory limit; a later layer would silently drop the other."""
    limits = {
        key
        for table in asked
        if isinstance(memory := table.get("memory"), dict)
        for key in LIMITS
        if memory.get(key) not in (None, "none")
    }
    if len(limits) > 1:
        raise UsageError(f"memory: {' and '.join(sorted(limits))} are both given: give one of them")


def tell(text: str) -> None:
    """Say something about progress."""
    typer.echo(text, err=True)


def today() -> str:
    """The date that figures and tables carry."""
    return date.today().isoformat()


def print_json(document: Any) -> None:
    """Print the one JSON document of `--json`."""
    typer.echo(json.dumps(document, indent=1))
