"""One configuration, simulated: what sweeps compute, and what its answer depends on."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specter_sim.config import RunConfig, Table, build
from specter_sim.engine.run import simulate_compiled, why_not
from specter_sim.hardware import ModelShape, find_machine, find_model
from specter_sim.policies.own import is_own, source_of
from specter_sim.results import Engine, Result
from specter_sim.setup import BUNDLED_FAMILY, Setup, resolve, whole_trace
from specter_sim.setup.rules import policies_of
from specter_sim.sim import simulate
from specter_traces import bundled_names
from specter_traces.errors import printable


class NeedsSimpyError(Exception):
    """A configuration that only the SimPy engine can run; its text says why."""


def evaluate(table: Table, engine: Engine = Engine.COMPILED) -> dict[str, Any]:
    """Simulate a resolved configuration and return its row. Raises SpecterError.

    What the compiled engine cannot run runs on the SimPy engine, with a note that says why.
    """
    setup = resolve(build(table))
    reason = why_not(setup)
    if engine is Engine.COMPILED and reason is None:
        return _row(setup, simulate_compiled(setup), Engine.COMPILED)
    return _row(setup, simulate(_noted(setup, reason)), Engine.SIMPY)


def evaluate_compiled(table: Table) -> dict[str, Any]:
    """``evaluate`` on the compiled engine alone, for threads, which SimPy would not share.

    Raises NeedsSimpyError for what that engine cannot run.
    """
    setup = resolve(build(table))
    reason = why_not(setup)
    if reason is not None:
        raise NeedsSimpyError(reason)
    return _row(setup, simulate_compiled(setup), Engine.COMPILED)


def _noted(setup: Setup, reason: str | None) -> Setup:
    if reason is None:
        return setup
    return replace(setup, notes=(*setup.notes, f"run on the SimPy engine: {reason}"))


def _row(setup: Setup, result: Result, engine: Engine) -> dict[str, Any]:
    row = result.row() | place_of(setup) | {"engine": engine.value}
    # Names come out of a trace's header: any text, even what no table can hold.
    return {
        key: printable(value) if isinstance(value, str) else value for key, value in row.items()
    }


def place_of(setup: Setup) -> dict[str, Any]:
    """Where a run takes place, beyond what the configuration says itself."""
    return {
        "trace_name": setup.trace.header.name,
        "link_bytes_per_s": setup.machine.link.bytes_per_s,
        "link_latency_s": setup.machine.link.latency_s,
        "gpu_memory_bytes": setup.machine.gpu.memory_bytes,
    }


def inputs_of(config: RunConfig) -> str:
    """Identity of everything a configuration names and does not contain.

    That is the trace's content, the model and the machine as they resolve (files they start from
    included), and the user's own rules.
    """
    shape, machine = find_model(config.model), find_machine(config.machine.name)
    told = hashlib.sha256(repr((shape, machine)).encode()).hexdigest()
    return " ".join([_routes_hash(config, shape), told, *_own_rules(config)])


def _routes_hash(config: RunConfig, shape: ModelShape) -> str:
    trace = config.trace
    if trace.path == "synth":
        # What it is made from; how it is made is in the configuration already.
        trace = trace.model_copy(update={"path": BUNDLED_FAMILY})
    routes = whole_trace(config.model_copy(update={"trace": trace}), shape)
    if trace.path in (BUNDLED_FAMILY, *bundled_names()):
        return routes.header.content_hash
    return _file_hash(trace.path)  # a foreign header can state any content hash


def inputs_reader() -> Callable[[RunConfig], str]:
    """``inputs_of``, which reads the same names once: for one sweep, not for ever."""
    known: dict[tuple[object, ...], str] = {}

    def inputs(config: RunConfig) -> str:
        policy, bits = config.policy, config.experts.draft_bits
        rules = (policy.eviction, policy.prefetch, policy.depth)
        named = (config.model, config.trace, config.machine.name, bits, *rules)
        if named not in known:
            known[named] = inputs_of(config)
        return known[named]

    return inputs


def _own_rules(config: RunConfig) -> list[str]:
    """Hashes of the files of the user's own policies."""
    names = (config.policy.eviction, config.policy.prefetch, config.policy.depth)
    if not any(map(is_own, names)):
        return []
    policies_of(config)  # imports them
    return [_file_hash(str(source_of(name))) for name in names if is_own(name)]


def _file_hash(name: str) -> str:
    path = Path(name)
    stat = path.stat()
    return _hash_of(path, stat.st_mtime_ns, stat.st_size)


@lru_cache
def _hash_of(path: Path, modified_ns: int, size: int) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
