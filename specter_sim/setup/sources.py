"""Where routes come from: bundled traces, files, and synthesis to a model's shape.

Each is read or made once a process; a file that changed on disk is read again.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from specter_sim.config import RunConfig
from specter_sim.hardware import ModelShape
from specter_sim.names import suggestion
from specter_traces import Trace, bundled, bundled_names, load
from specter_traces.errors import UsageError
from specter_traces.files import refuse_irregular
from specter_traces.synthesize import synthesize

BUNDLED_FAMILY = "tiny-moe"
LEAST_SYNTHETIC_TOKENS = 512


def whole_trace(config: RunConfig, shape: ModelShape) -> Trace:
    """The trace a configuration names: bundled, synthesized to the model's shape, or a file.

    Raises UsageError when there is no such trace.
    """
    path, bits = config.trace.path, config.experts.draft_bits
    if path == "synth":
        tokens = max(LEAST_SYNTHETIC_TOKENS, 2 * config.trace.tokens)
        size = shape.moe_layers, shape.num_experts, shape.top_k
        return _synthesized(bundled_by_bits(bits), *size, tokens, config.trace.seed)
    return named_trace(path, bits)


def named_trace(path: str, bits: int | None) -> Trace:
    """The trace called `path`: bundled, that of a draft of `bits` where there are several, or a
    file. Raises UsageError when there is no such trace.
    """
    if path == BUNDLED_FAMILY:
        return _bundled(bundled_by_bits(bits))
    if path in bundled_names():
        return _bundled(path)
    file = Path(path)
    refuse_irregular(file)
    if not file.exists():
        hint = suggestion(path, [BUNDLED_FAMILY, *bundled_names(), "synth"])
        raise UsageError(f'no bundled trace and no file is called "{path}": {hint}')
    stat = file.stat()
    return _file(path, stat.st_mtime_ns, stat.st_size)


def bundled_by_bits(bits: int | None) -> str:
    """The bundled trace whose draft has that many bits, else the one with the most."""
    name = f"{BUNDLED_FAMILY}-base{bits}"
    return name if name in bundled_names() else f"{BUNDLED_FAMILY}-base4"


@lru_cache(maxsize=8)
def _bundled(name: str) -> Trace:
    return bundled(name)


@lru_cache(maxsize=8)
def _file(path: str, modified_ns: int, size: int) -> Trace:
    return load(path)


@lru_cache(maxsize=8)
def _synthesized(
    source: str, layers: int, experts: int, top_k: int, tokens: int, seed: int
) -> Trace:
    return synthesize(_bundled(source), layers, experts, top_k, tokens, seed)
