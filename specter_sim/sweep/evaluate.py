"""One configuration, simulated: what sweeps compute, and what its answer depends on."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from specter_sim.config import RunConfig, Table, build
from specter_sim.hardware import find_model
from specter_sim.setup import BUNDLED_FAMILY, Setup, resolve, whole_trace
from specter_sim.sim import simulate


def evaluate(table: Table) -> dict[str, Any]:
    """Simulate a resolved configuration and return its row. Raises SpecterError."""
    setup = resolve(build(table))
    return simulate(setup).row() | place_of(setup)


def place_of(setup: Setup) -> dict[str, Any]:
    """Where a run takes place, beyond what the configuration says itself."""
    return {
        "trace_name": setup.trace.header.name,
        "link_bytes_per_s": setup.machine.link.bytes_per_s,
        "link_latency_s": setup.machine.link.latency_s,
        "gpu_memory_bytes": setup.machine.gpu.memory_bytes,
    }


def inputs_of(config: RunConfig) -> str:
    """Hashes of everything a configuration names and does not contain: trace, and own files."""
    trace = config.trace
    if trace.path == "synth":
        # What it is made from; how it is made is in the configuration already.
        trace = trace.model_copy(update={"path": BUNDLED_FAMILY})
    routes = whole_trace(config.model_copy(update={"trace": trace}), find_model(config.model))
    files = [_file_hash(name) for name in (config.model, config.machine.name)]
    return " ".join([routes.header.content_hash, *files])


@lru_cache
def _file_hash(name: str) -> str:
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "built in"
