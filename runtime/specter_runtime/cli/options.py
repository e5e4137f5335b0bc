"""Options that several commands share, and the configuration they describe together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specter_runtime.cli.systems import DEFAULTS, DRAFTED, PLAIN
from specter_traces.errors import UsageError

if TYPE_CHECKING:
    from specter_runtime.sampling import Sampling
    from specter_sim.config import RunConfig

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Bundled model, a folder, or a hub id [default: tiny-moe, or the configuration's].",
    ),
]
VramOption = Annotated[
    str | None, typer.Option(help='Device memory for everything, never exceeded: "8 GiB".')
]
SlotsOption = Annotated[str | None, typer.Option(help="Slots per MoE layer, instead of --vram.")]
LinkOption = Annotated[str | None, typer.Option(help='Bandwidth of the emulated link: "12 GB/s".')]
PolicyOption = Annotated[
    str | None,
    typer.Option(help="A preset (`specter-sim policies`), plain, or plain-drafted."),
]
DepthOption = Annotated[
    str | None, typer.Option(help="Tokens drafted a window: a number, governor, never.")
]
DraftBitsOption = Annotated[str | None, typer.Option(help="Bits of the draft: 2, 3, 4 or 8.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration, as `specter-sim tune` writes."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key: --set memory.slots=12."),
]
DeviceOption = Annotated[
    str, typer.Option(help="emulated (copies paced like a link's) or immediate (not paced).")
]
DtypeOption = Annotated[
    str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads [default: all, but one for an emulated link].")
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="Sample at this temperature; greedy without it.")
]
TopKOption = Annotated[int | None, typer.Option(help="Sample from the so many likeliest tokens.")]
TopPOption = Annotated[float | None, typer.Option(help="Sample from this share of probability.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the sampled text.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, last.")]


@dataclass(frozen=True)
class System:
    """What is run and on what, as far as the command line says; None leaves it to the rest."""

    model: str | None = None
    config: Path | None = None
    policy: str | None = None
    vram: str | None = None
    slots: str | None = None
    link: str | None = None
    depth: str | None = None
    draft_bits: str | None = None
    settings: tuple[str, ...] = ()
    device: str = "emulated"
    dtype: str = "auto"
    threads: int | None = None


def configuration(system: System) -> RunConfig:
    """The configuration of a file, under a policy, under options, under `--set`.

    What none of them says is one of the systems of `systems`: the one that drafts if a depth is
    asked for. Raises UsageError.
    """
    from specter_sim.config import build, nest

    if system.link is not None and system.device != "emulated":
        raise UsageError("--link paces the emulated device: leave out --device, or --link")
    if system.vram is not None and system.slots is not None:
        raise UsageError("--vram and --slots both say how many experts fit: give one of them")
    layers = _layers(system)
    asked = build(*layers)
    if asked.preset is not None or system.policy in DEFAULTS:
        return asked
    default = PLAIN if asked.policy.depth == "never" else DRAFTED
    return build(nest(DEFAULTS[default]), *layers)


def _layers(system: System) -> list[Mapping[str, Any]]:
    from specter_sim.cli.options import layers
    from specter_sim.config import nest

    shortcuts = {
        "model": system.model,
        "memory.budget": system.vram,
        "memory.slots": system.slots,
        "machine.link_bandwidth": system.link,
        "policy.depth": system.depth,
        "experts.draft_bits": system.draft_bits,
    }
    table, named, *asked = layers(
        system.config, list(system.settings), shortcuts, _preset(system.policy)
    )
    if system.policy in DEFAULTS:
        named = {"preset": "none", **nest(DEFAULTS[system.policy])}
    return [table, named, *asked]


def _preset(policy: str | None) -> str | None:
    """The preset that a policy names, if it is none of our own systems."""
    from specter_sim.names import suggestion
    from specter_sim.presets import PRESETS

    if policy is None or policy in DEFAULTS:
        return None
    if policy not in PRESETS:
        known = {**DEFAULTS, **PRESETS}
        raise UsageError(f'unknown policy "{policy}": {suggestion(policy, known)}')
    return policy


def policy_name(system: System, config: RunConfig) -> str:
    """What the system is called: by its name where it has one, else by its rules."""
    rules = f"{config.policy.eviction} + {config.policy.prefetch}"
    name = system.policy or config.preset or rules
    depth = config.policy.depth_params.get("depth", config.policy.depth)
    return f"{name}, depth {0 if depth == 'never' else depth}"


def sampling_of(
    temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> Sampling | None:
    """How tokens are drawn; None is greedy, as is a temperature of 0."""
    if not temperature:
        if top_k is not None or top_p is not None:
            raise UsageError("--top-k and --top-p are about sampling: give --temperature too")
        return None
    from specter_runtime.sampling import Sampling

    return Sampling(temperature, top_k, 1.0 if top_p is None else top_p, seed)


def check_count(option: str, value: int | None) -> None:
    """Raise UsageError unless a given count is at least 1."""
    if value is not None and value < 1:
        raise UsageError(f"{option} must be at least 1, got {value}")


def tell(text: str) -> None:
    """Say something that is no result."""
    typer.echo(text, err=True)


def today() -> str:
    """The date that figures and tables carry."""
    return date.today().isoformat()


def print_json(document: Any) -> None:
    """Print the one JSON document of `--json`."""
    typer.echo(json.dumps(document, indent=1))
