"""Policies by name, with checked parameters and the memory each starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from specter_sim.config import RunConfig
from specter_sim.hardware import Costs, Machine, ModelShape
from specter_sim.names import suggestion
from specter_sim.policies import governor, paper_planner
from specter_sim.policies.catalogue import (
    DEPTH,
    EVICTION,
    PREFETCH,
    DepthInfo,
    EvictionInfo,
    PolicyInfo,
    PrefetchInfo,
    Scalar,
)
from specter_sim.policies.own import is_own, own_depth, own_eviction, own_prefetch
from specter_traces.errors import UsageError

P = TypeVar("P", bound=PolicyInfo)


def policies_of(config: RunConfig) -> tuple[EvictionInfo, PrefetchInfo, DepthInfo]:
    """The three policies by name; a number as depth means that fixed depth."""
    return eviction_of(config), prefetch_of(config), depth_of(config)


def eviction_of(config: RunConfig) -> EvictionInfo:
    """The eviction policy by name."""
    name = config.policy.eviction
    return own_eviction(name) if is_own(name) else named(EVICTION, name, "eviction")


def prefetch_of(config: RunConfig) -> PrefetchInfo:
    """The prefetch policy by name."""
    name = config.policy.prefetch
    return own_prefetch(name) if is_own(name) else named(PREFETCH, name, "prefetch")


def depth_of(config: RunConfig) -> DepthInfo:
    """The depth policy by name."""
    name = config.policy.depth
    return own_depth(name) if is_own(name) else named(DEPTH, name, "depth")


def named(known: Mapping[str, P], name: str, kind: str) -> P:
    """The policy of that name. Raises UsageError with the nearest."""
    if name not in known:
        raise UsageError(f'unknown {kind} policy "{name}": {suggestion(name, known)}')
    return known[name]


def params_of(info: PolicyInfo, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Defaults overlaid with what was given. Raises UsageError for unknown or impossible ones."""
    values = {name: param.default for name, param in info.params.items()}
    for name, value in given.items():
        if name not in info.params:
            hint = suggestion(name, info.params) if info.params else "it takes none"
            raise UsageError(f'policy "{info.name}" has no parameter "{name}": {hint}')
        values[name] = checked(info, name, value)
    return values


def checked(info: PolicyInfo, name: str, value: Scalar) -> Scalar:
    """A parameter's value, of its type and in its range."""
    param = info.params[name]
    kind = type(param.default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = isinstance(value, kind) or (kind is float and number)
    if not fits or (kind is not bool and isinstance(value, bool)):
        raise UsageError(f"{info.name}.{name} ({param.doc}) must be {kind.__name__}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{info.name}.{name} ({param.doc}) must be finite, got {value!r}")
    low = param.least is not None and number and value < param.least  # type: ignore[operator]
    high = param.most is not None and number and value > param.most  # type: ignore[operator]
    if low or high:
        most = "any" if param.most is None else param.most
        raise UsageError(
            f"{info.name}.{name} ({param.doc}) must lie in {param.least} .. {most}, got {value!r}"
        )
    return value


def check_policies(
    config: RunConfig, eviction: EvictionInfo, prefetch: PrefetchInfo, drafts: bool
) -> None:
    """Combinations that make no sense."""
    if "paired" in prefetch.needs and not drafts:
        raise UsageError(
            f'prefetch "{prefetch.name}" follows a draft, but depth is "{config.policy.depth}": '
            "choose a depth of at least 1, or another prefetch"
        )
    if config.policy.demand == "staging" and config.memory.staging_slots == 0:
        raise UsageError(
            "demand = staging needs transient slots: set memory.staging_slots to at least 1"
        )
    if prefetch.name == "stream" and config.memory.layout != "global":
        raise UsageError('prefetch "stream" moves whole layers: set memory.layout = "global"')


def prefetch_memory(
    info: PrefetchInfo, params: Mapping[str, Scalar], load_bytes: int
) -> tuple[float, ...]:
    """What the prefetch rule starts a request with."""
    if info.name == "paper":
        return tuple(paper_planner.new_memory(float(load_bytes)))
    return tuple(float(value) for value in params.values())


@dataclass(frozen=True)
class Expectation:
    """What windows are expected to take, by depth 0 and up: where a governor starts from.

    Attributes:
        draft_s, verify_s: seconds of the draft, and of the verify pass's compute.
        demands: experts demanded over all layers.
        load_s: seconds of one load on the link.
    """

    draft_s: Sequence[float]
    verify_s: Sequence[float]
    demands: Sequence[float]
    load_s: float


def depth_memory(
    info: DepthInfo, params: Mapping[str, Scalar], expect: Callable[[int], Expectation]
) -> tuple[float, ...]:
    """What the depth rule starts with; ``expect(most)`` answers for depths 0 to ``most``."""
    if is_own(info.name):
        return tuple(float(value) for value in params.values())
    if info.name != "governor":
        return (float(params.get("depth", 0)),)
    e = expect(int(params["most"]))
    return tuple(
        governor.new_memory(e.draft_s, e.verify_s, e.demands, e.load_s, int(params["probe"]))
    )


def expected_by_costs(
    most: int,
    unions: Sequence[float],
    shape: ModelShape,
    machine: Machine,
    costs: Costs,
    context: int,
) -> Expectation:
    """By the cost model; ``unions`` are experts a layer needs, by depth."""
    layers, depths = shape.moe_layers, range(most + 1)
    return Expectation(
        [depth * costs.draft_step_s(context) for depth in depths],
        [
            layers * costs.layer_s(depth + 1, context)
            + layers * costs.experts_s(round(unions[depth]), (depth + 1) * shape.top_k)
            + costs.fixed_s(depth + 1, context)
            for depth in depths
        ],
        [layers * unions[depth] for depth in depths],
        machine.link.copy_s(costs.load_bytes),
    )
