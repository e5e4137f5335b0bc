"""What `specter-sim bench` measures: medians of several runs, each beside its peer."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specter_sim.config import build
from specter_sim.engine import replay_kernels as kernels
from specter_sim.engine.curves import layer_ids, lookup_starts
from specter_sim.engine.run import simulate_compiled
from specter_sim.setup import resolve
from specter_sim.sim import simulate
from specter_traces import bundled
from specter_traces.errors import SpecterError
from specter_traces.synthesize import synthesize

MODEL, MACHINE = "qwen3-30b-a3b", "rtx-5090"
SLOTS = 32
REPLAYED = (8, 128, 8, 20_000)  # layers, experts, top-k, tokens of the replayed lookups


@dataclass(frozen=True)
class Speed:
    """One line of the table.

    Attributes:
        goal: the rate to reach (or the seconds not to exceed); None when there is none.
        peer: what it stands beside, and ``ratio`` how many times faster this is.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    ratio_goal: float | None = None


# --- the full schedule ----------------------------------------------------------------------------


def schedule_speeds(tokens: int, repeats: int) -> Iterator[Speed]:
    """Token-layers a second of the SimPy world and of the compiled engine, set-up left out."""
    for name, preset, goal, ratio_goal in (
        ("on-demand LRU", "on-demand-lru", 10e6, 300.0),
        ("draft, prefetch, governor", "specter", 2e6, None),
    ):
        setup = resolve(build({"preset": preset}, _schedule_table(tokens)))
        simulate_compiled(setup)  # compiles
        world_s = _median_s(partial(simulate, setup), min(repeats, 3))
        engine_s = _median_s(partial(simulate_compiled, setup), repeats)
        work = simulate_compiled(setup).committed_tokens * setup.shape.moe_layers
        yield Speed(f"SimPy world, {name}", work / world_s, "token-layers/s")
        yield Speed(
            f"compiled engine, {name}",
            work / engine_s,
            "token-layers/s",
            goal,
            "SimPy world",
            work / world_s,
            world_s / engine_s,
            ratio_goal,
        )


def _schedule_table(tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "trace": {"path": "synth", "tokens": tokens},
        "machine": {"name": MACHINE},
        "memory": {"slots": SLOTS, "layout": "per-layer"},
    }


def schedule_conditions(tokens: int) -> str:
    """What the schedules were run on."""
    return (
        f"schedule: {MODEL} on {MACHINE}, synthetic routes, {tokens} tokens, "
        f"{SLOTS} of 128 slots a layer, a layer's own"
    )


# --- hit-only replays -----------------------------------------------------------------------------


def replay_speeds(repeats: int, peer: Path | None = None) -> Iterator[Speed]:
    """Lookups a second of every fast replay, beside libcachesim where its script is given.

    Raises SpecterError when the two disagree about a single miss, or the script fails.
    """
    trace = synthesize(bundled("tiny-moe-base4"), *REPLAYED, 0)
    ids, starts = layer_ids(trace), lookup_starts(trace, warm=True)
    experts, top_k, one = trace.num_experts, trace.top_k, np.array([SLOTS])
    ours: dict[str, Callable[[Any], int]] = {
        "lru": lambda row: kernels.lru_misses(row, starts, experts, SLOTS),
        "fifo": lambda row: int(kernels.fifo_misses(row, starts, experts, one)[0]),
        "lfu": lambda row: kernels.lfu_misses(row, starts, experts, SLOTS),
        "belady": lambda row: int(kernels.belady_distances(row, starts, experts)[SLOTS:].sum()),
    }
    theirs = _libcachesim(peer, ids, starts, experts, repeats)
    goals = {"lru": 100e6, "fifo": 100e6, "lfu": 40e6, "belady": 25e6}
    for policy, replay in ours.items():
        speed = _replay_speed(policy, replay, ids, repeats, goals[policy])
        yield _beside(speed, theirs.get(policy), sum(map(replay, ids)), ids.size)
    whole = _replay_speed(
        "whole LRU curve", lambda row: _lru_curve(row, starts, experts, top_k), ids, repeats, 15e6
    )
    lru = theirs.get("lru")
    if lru is not None:
        each = ids.size / lru["seconds"] / experts
        beside = f"libcachesim, {experts} sizes"
        whole = replace(whole, peer=beside, peer_value=each, ratio=whole.value / each)
    yield whole


def replay_conditions() -> str:
    """What the replays were run on."""
    layers, experts, top_k, tokens = REPLAYED
    return (
        f"replays: synthetic routes, {layers} layers x {experts} experts, top-{top_k}, {tokens:,} "
        f"tokens, {SLOTS} slots, one by one; lookups already laid out by layer on both sides; "
        "Belady includes finding next uses and counts every size"
    )


def _replay_speed(
    name: str, replay: Callable[[Any], int], ids: Any, repeats: int, goal: float
) -> Speed:
    replay(ids[0])  # compiles
    seconds = _median_s(lambda: [replay(row) for row in ids], repeats)
    return Speed(f"replay, {name}", ids.size / seconds, "lookups/s", goal)


def _beside(speed: Speed, peer: Mapping[str, Any] | None, misses: int, lookups: int) -> Speed:
    if peer is None:
        return replace(speed, peer="libcachesim (no --peer)")
    if peer["misses"] != misses:
        raise SpecterError(
            f"{speed.what}: {misses} misses, libcachesim counts {peer['misses']}: report a bug"
        )
    rate = lookups / peer["seconds"]
    return replace(speed, peer="libcachesim", peer_value=rate, ratio=speed.value / rate)


def _lru_curve(row: Any, starts: Any, experts: int, top_k: int) -> int:
    return int(kernels.lru_distances(row, starts, experts, top_k)[0][SLOTS:].sum())


def _libcachesim(
    script: Path | None, ids: Any, starts: Any, experts: int, repeats: int
) -> dict[str, Any]:
    """Its misses and seconds by policy, measured in another process; empty without its script."""
    if script is None:
        return {}
    with tempfile.TemporaryDirectory(prefix="specter-bench-") as folder:
        for layer, row in enumerate(ids):
            _write_lookups(row, starts, experts, Path(folder) / f"{layer:03}.oracleGeneral")
        arguments = [sys.executable, script, folder, SLOTS, repeats]
        done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SpecterError(f"the peer {script} failed: {reason}; is libcachesim installed?")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _write_lookups(ids: Any, starts: Any, experts: int, path: Path) -> None:
    """The library's binary format: time u32, object u64, size u32, next access i64 (-1: none)."""
    rows = np.zeros(
        len(ids), np.dtype([("t", "<u4"), ("id", "<u8"), ("size", "<u4"), ("n", "<i8")])
    )
    following = kernels.next_uses(ids, starts, experts)
    rows["t"], rows["id"], rows["size"] = np.arange(len(ids)), ids.astype(np.uint64) + 1, 1
    rows["n"] = np.where(following < len(ids), following, -1)
    rows.tofile(path)


# --- processes ------------------------------------------------------------------------------------

_ENGINE = (
    "from specter_sim.config import build; from specter_sim.setup import resolve; "
    "from specter_sim.engine.run import simulate_compiled; "
    "print(simulate_compiled(resolve(build({'preset': 'specter'}))).tpot_s)"
)
_COMMAND = "from specter_sim.cli import main; main()"


def process_speeds(repeats: int) -> Iterator[Speed]:
    """Seconds from starting a process to its answer; JIT cache empty and filled."""
    yield Speed("specter-sim --help", _wall_s(partial(_start, _COMMAND, "--help"), repeats), "s")
    run = ("run", "--preset", "specter")
    for name, code, arguments in (
        ("specter-sim run", _COMMAND, run),
        ("compiled engine, one configuration", _ENGINE, ()),
    ):
        with tempfile.TemporaryDirectory(prefix="specter-jit-") as folder:
            cold_s = _wall_s(partial(_start, code, *arguments, cache=folder), 1)
            warm_s = _wall_s(partial(_start, code, *arguments, cache=folder), repeats)
        yield Speed(f"first answer, {name}, cold JIT cache", cold_s, "s", 6.0)
        yield Speed(f"first answer, {name}, warm JIT cache", warm_s, "s", 1.0)


def _start(code: str, *arguments: str, cache: str | None = None) -> None:
    environment = os.environ | ({} if cache is None else {"NUMBA_CACHE_DIR": cache})
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def _median_s(
    work: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Median seconds; by default of this process's CPU time, which a busy machine hardly moves."""

    def once() -> float:
        started = clock()
        work()
        return clock() - started

    return statistics.median(once() for _ in range(repeats))


_wall_s = partial(_median_s, clock=time.perf_counter)
