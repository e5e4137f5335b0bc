"""From a configuration to the rules and the state of a live run.

The policies are the simulator's. What a rule is given when it is built comes from the loaded model
instead of a trace; rules that know the future cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specter_sim.config import RunConfig
from specter_sim.offload.offloader import Rules
from specter_sim.policies.catalogue import (
    DEPTH,
    DepthInfo,
    EvictionInfo,
    PolicyInfo,
    PrefetchInfo,
    Scalar,
)
from specter_sim.policies.state import State, new_state
from specter_sim.setup.residents import fill, hot_set
from specter_sim.setup.rules import (
    Expectation,
    check_policies,
    depth_memory,
    params_of,
    policies_of,
    prefetch_memory,
)
from specter_traces.errors import UsageError


@dataclass(frozen=True)
class Policies:
    """The three policies of a configuration with their parameters."""

    eviction: EvictionInfo
    prefetch: PrefetchInfo
    depth: DepthInfo
    eviction_params: dict[str, Scalar]
    prefetch_params: dict[str, Scalar]
    depth_params: dict[str, Scalar]

    @property
    def drafts(self) -> bool:
        """Whether a draft is ever run."""
        return self.depth.name != "never" and self.depth_params.get("depth") != 0

    def without_draft(self) -> Policies:
        """The same at depth 0: prefetch that follows a draft then has nothing to follow."""
        return replace(self, depth=DEPTH["never"], depth_params={})

    @property
    def uses_gate(self) -> bool:
        """Whether the next layer's router is asked one layer early."""
        return "gate" in self.prefetch.needs

    @property
    def streams(self) -> bool:
        """Whether layers are loaded whole, needed or not."""
        return self.prefetch.name == "stream"

    @property
    def deepest(self) -> int:
        """The most tokens one window drafts."""
        if not self.drafts:
            return 0
        return int(self.depth_params.get("most", self.depth_params.get("depth", 16)))


def live_policies(config: RunConfig) -> Policies:
    """The policies a configuration names; UsageError for one that only a simulator can follow."""
    eviction, prefetch, depth = policies_of(config)
    for info in (eviction, prefetch):
        if "future" in info.needs:
            raise UsageError(f'policy "{info.name}" reads the future: only specter-sim can run it')
    if depth.name == "profile":
        raise UsageError('depth "profile" is measured by specter-sim: give a number, or "governor"')
    policies = Policies(
        eviction,
        prefetch,
        depth,
        params_of(eviction, config.policy.eviction_params),
        params_of(prefetch, config.policy.prefetch_params),
        params_of(depth, config.policy.depth_params),
    )
    check_policies(config, eviction, prefetch, policies.drafts)
    return policies


def needs_popularity(config: RunConfig, policies: Policies) -> str:
    """What has to know how often each expert is used; empty when nothing does."""
    if config.memory.initial == "popular":
        return 'memory.initial = "popular"'
    infos: tuple[PolicyInfo, ...] = (policies.eviction, policies.prefetch)
    for info in infos:
        if "popularity" in info.needs and not policies.streams:
            return f'policy "{info.name}"'
    return ""


def live_rules(policies: Policies, load_bytes: int, expect: Callable[[int], Expectation]) -> Rules:
    """The rules with the memory they start from."""
    return Rules(
        policies.eviction.rule,
        policies.prefetch.rule,
        policies.depth.rule,
        prefetch_memory(policies.prefetch, policies.prefetch_params, load_bytes),
        depth_memory(policies.depth, policies.depth_params, expect),
    )


def live_state(
    config: RunConfig,
    policies: Policies,
    groups: tuple[int, ...],
    staging: int,
    top_k: int,
    popularity: NDArray[np.float64],
) -> State:
    """A device with the configured initial residents. popularity: [L, E] uses, zeros if unknown."""
    layers, experts = popularity.shape
    params = policies.eviction_params
    hot = hot_set(policies.prefetch, policies.eviction, params, popularity, groups)
    state = new_state(
        layers,
        experts,
        top_k,
        groups,
        staging_slots=staging,
        decay=float(params.get("decay", 1.0)),
        forget=bool(params.get("forget", False)),
        seed=config.trace.seed,
        hot=hot,
    )
    fill(state, config.memory.initial, groups, hot, popularity)
    return state
