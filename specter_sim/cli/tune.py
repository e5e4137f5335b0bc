"""`specter-sim tune`: the best system for a memory budget, what each choice is worth, a file."""

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from specter_sim.cli.app import INTERRUPTED
from specter_sim.cli.options import (
    ConfigArgument,
    JsonOption,
    MachineOption,
    ModelOption,
    OutOption,
    SetOption,
    TokensOption,
    TraceOption,
    layers,
    print_json,
    tell,
)
from specter_sim.config import RunConfig, build, content_hash, to_toml
from specter_traces.files import write_atomic

if TYPE_CHECKING:
    from specter_sim.tune.scores import Objective
    from specter_sim.tune.search import Search
    from specter_sim.tune.space import Space
    from specter_sim.tune.tuning import Tuning

Named = TypeVar("Named", bound=StrEnum)

BEST = "best.toml"
DOCUMENT = "tune.json"
TRIALS = "trials"
DEFAULT_TOKENS = 512


def tune(
    config: ConfigArgument = None,
    settings: SetOption = None,
    budget: Annotated[
        str | None, typer.Option(help='Device memory for all: "24 GiB" [default: the machine\'s].')
    ] = None,
    model: ModelOption = None,
    trace: TraceOption = None,
    machine: MachineOption = None,
    tokens: TokensOption = None,
    objective: Annotated[
        str, typer.Option(metavar="tpot|p99", help="Minimise the mean or the 99th percentile.")
    ] = "tpot",
    search: Annotated[
        str,
        typer.Option(
            metavar="auto|exhaustive|optuna", help="All choices where they are few, else sampled."
        ),
    ] = "auto",
    trials: Annotated[int, typer.Option(min=1, help="Choices that Optuna samples.")] = 400,
    out: OutOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Threads that compute [default: all cores].")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Rows of the table of the best.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Choose depth, eviction, prefetch, slots, coding and draft for a memory budget.

    Tuned on every second sequence of the trace, reported on the others. A rerun in the same folder
    computes only what is missing.
    """
    from specter_sim.cli.tune_output import document, print_tuning
    from specter_sim.tune.scores import Objective
    from specter_sim.tune.search import Search, chosen_search
    from specter_sim.tune.space import Space

    shortcuts = {
        "model": model,
        "trace.path": trace,
        "trace.tokens": tokens,
        "machine.name": machine,
        "memory.budget": budget,
    }
    given = build({"trace": {"tokens": DEFAULT_TOKENS}}, *layers(config, settings, shortcuts))
    wanted, how = _named(Objective, objective, "objective"), _named(Search, search, "search")
    space = Space(given, _budget_bytes(given))
    how = chosen_search(how, space)
    folder = out or Path("results") / "tune"
    started = time.monotonic()
    found, scored, reused = _searched(space, given, wanted, how, trials, workers, folder)
    write_atomic(folder / BEST, to_toml(found.winner.config))
    told = document(found, space, folder / BEST) | {
        "search": {
            "way": str(how),
            "space": space.size,
            "scored": scored,
            "reused": reused,
            "wall_s": round(time.monotonic() - started, 3),
        }
    }
    _write_document(folder, told)
    if as_json:
        print_json(told)
        return
    print_tuning(found, space, told, top)
    typer.echo(f"\nwrote {folder / BEST} and {folder / DOCUMENT}")
    typer.echo(f"run the winner with: specter-sim run {folder / BEST}")


def _named(kind: type[Named], name: str, option: str) -> Named:
    from specter_sim.names import suggestion
    from specter_traces.errors import UsageError

    known = [str(member) for member in kind]
    if name not in known:
        raise UsageError(f'unknown --{option} "{name}": {suggestion(name, known)}')
    return kind(name)


def _budget_bytes(given: RunConfig) -> int:
    from specter_sim.setup.memory import machine_of

    return given.memory.budget or machine_of(given).gpu.memory_bytes


def _searched(
    space: "Space",
    given: RunConfig,
    objective: "Objective",
    how: "Search",
    trials: int,
    workers: int | None,
    folder: Path,
) -> tuple["Tuning", int, int]:
    """What tuning found, how many choices have a score, and how many of them had it before."""
    from specter_sim.cli.sweep import progress_bar
    from specter_sim.sweep.executor import default_workers
    from specter_sim.sweep.store import Store
    from specter_sim.tune.scores import Scores
    from specter_sim.tune.search import run_search
    from specter_sim.tune.tuning import conclude

    try:
        with Store(folder / TRIALS) as store, progress_bar() as progress:
            scores = Scores(space, objective, store, _identity(space))
            if not sys.stderr.isatty():
                tell(f"searching; scores go to {folder / TRIALS}; this can take minutes")
            run_search(how, scores, trials, workers or default_workers(), folder, progress)
            return conclude(scores, given), len(scores), scores.reused
    except KeyboardInterrupt:
        told = f"interrupted; what was computed is in {folder}: the same command goes on there"
        print(f"error: {told}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _identity(space: "Space") -> str:
    """What every score depends on beside the choice."""
    from specter_sim import __version__
    from specter_sim.sweep.evaluate import inputs_of

    inputs = [inputs_of(space.with_bits(bits)) for bits in (None, *space.bits)]
    return content_hash(space.base, str(space.budget_bytes), *inputs, __version__)


def _write_document(folder: Path, told: dict[str, Any]) -> None:
    import json

    write_atomic(folder / DOCUMENT, json.dumps(told, indent=1) + "\n")
