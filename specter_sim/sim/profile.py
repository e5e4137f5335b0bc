"""Offline depth profiling: try every candidate depth beforehand and keep the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specter_sim.config import RunConfig
from specter_sim.results import Result
from specter_sim.setup import Setup, resolve
from specter_traces.errors import UsageError


def with_profiled_depth(setup: Setup, simulate: Callable[[Setup], Result]) -> Setup:
    """The setup with the depth that had the least TPOT in short runs (arXiv 2511.14102, depth
    profiling: the plain argmin over candidates; the depth never changes at run time).
    """
    tokens = int(setup.params["depth"]["tokens"])
    tried = {
        depth: simulate(resolve(at_depth(setup.config, depth, tokens))).tpot_s
        for depth in candidates_of(setup)
    }
    best = min(tried, key=lambda depth: tried[depth])
    rules = replace(setup.rules, depth_memory=(float(best),))
    note = f"depth {best} chosen by profiling {', '.join(map(str, tried))} on {tokens} tokens"
    return replace(setup, rules=rules, notes=(*setup.notes, note))


def candidates_of(setup: Setup) -> list[int]:
    """The candidate depths. Raises UsageError when they are no list of whole numbers."""
    text = str(setup.params["depth"]["candidates"])
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f'profile.candidates must be whole depths from 1, like "1,2,4,8", got {text!r}'
        )
    return [int(part) for part in parts]


def at_depth(config: RunConfig, depth: int, tokens: int) -> RunConfig:
    """The configuration at a fixed depth, cut to ``tokens``."""
    policy = config.policy.model_copy(update={"depth": "fixed", "depth_params": {"depth": depth}})
    trace = config.trace.model_copy(update={"tokens": tokens})
    return config.model_copy(update={"policy": policy, "trace": trace})
