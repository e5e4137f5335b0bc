"""`specter-sim bench`: how fast the simulator itself is, on this machine, now."""

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from specter_sim.cli.options import JsonOption, print_json, today
from specter_sim.config import build

# Everything on: drafts, continuous prefetch, coded experts and a governed depth.
EVERYTHING = {
    "preset": "specter",
    "model": "tiny-moe",
    "trace": {"path": "tiny-moe"},
    "memory": {"slots": 16},
}


def bench(
    tokens: Annotated[int, typer.Option(min=16, help="Tokens to decode.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Runs; the fastest counts.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure the SimPy world, the start of the command line and its first answer."""
    measured = {
        "token_layers_per_s": _token_layers_per_s(tokens, repeats),
        "help_s": _least_s(lambda: _start("--help"), repeats),
        "first_answer_s": _least_s(lambda: _start("run", "--preset", "specter"), repeats),
    }
    place = {"date": today(), "python": platform.python_version(), "machine": _processor()}
    if as_json:
        print_json(place | {"tokens": tokens, "repeats": repeats} | measured)
        return
    typer.echo(f"{place['machine']}, Python {place['python']}, one core, {place['date']}")
    typer.echo(
        f"SimPy world, preset specter, {tokens} tokens: "
        f"{measured['token_layers_per_s']:,.0f} token-layers a second"
    )
    typer.echo(f"specter-sim --help: {measured['help_s']:.2f} s")
    typer.echo(f"specter-sim run, first answer: {measured['first_answer_s']:.2f} s")


def _token_layers_per_s(tokens: int, repeats: int) -> float:
    """Decoded tokens x MoE layers per second of the simulation alone, set-up left out."""
    from specter_sim.setup import resolve
    from specter_sim.sim import simulate

    setup = resolve(build(EVERYTHING, {"trace": {"tokens": tokens}}))
    committed = simulate(setup).committed_tokens
    seconds = _least_s(lambda: simulate(setup), repeats)
    return committed * setup.shape.moe_layers / seconds


def _start(*arguments: str) -> None:
    command = "from specter_sim.cli import main; main()"
    subprocess.run(
        [sys.executable, "-c", command, *arguments], check=True, stdout=subprocess.DEVNULL
    )


def _least_s(work: Callable[[], Any], repeats: int) -> float:
    def once() -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    return min(once() for _ in range(repeats))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = (line.partition(":")[2].strip() for line in file if "model name" in line)
            return next(names, platform.processor() or platform.machine())
    except OSError:
        return platform.processor() or platform.machine()
