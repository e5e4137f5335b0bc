"""Resolve a configuration: load and check everything it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_sim.config import RunConfig
from specter_sim.hardware import (
    Costs,
    ExpertForm,
    Machine,
    MemoryPlan,
    ModelShape,
    build_costs,
    expert_bytes,
    find_model,
    host_note,
)
from specter_sim.offload.offloader import Rules
from specter_sim.policies.catalogue import DepthInfo, EvictionInfo, PrefetchInfo, Scalar
from specter_sim.policies.state import State, list_of, new_state
from specter_sim.setup.memory import (
    check_slots,
    device_note,
    draft_bits,
    machine_of,
    memory_plan,
    slot_counts,
    staging_slots,
)
from specter_sim.setup.residents import fill, hot_set
from specter_sim.setup.rules import (
    check_policies,
    depth_memory,
    expected_by_costs,
    params_of,
    policies_of,
    prefetch_memory,
)
from specter_sim.setup.text import Request, Text, check_text, text_notes, text_of
from specter_traces import Trace


@dataclass(frozen=True)
class Setup:
    """A resolved run. Immutable; every run builds its own state from it."""

    config: RunConfig
    text: Text
    requests: tuple[Request, ...]
    shape: ModelShape
    machine: Machine
    costs: Costs
    plan: MemoryPlan
    slots: tuple[int, ...]
    eviction: EvictionInfo
    prefetch: PrefetchInfo
    depth: DepthInfo
    params: Mapping[str, Mapping[str, Scalar]]
    hot: NDArray[np.int64]
    rules: Rules
    notes: tuple[str, ...]

    @property
    def trace(self) -> Trace:
        """The served sequences."""
        return self.text.trace

    @property
    def demand_all(self) -> bool:
        """Whether layers are streamed whole, needed or not."""
        return self.prefetch.name == "stream"

    def new_state(self, position: int = 0, array: Callable[[int, float], Any] = list_of) -> State:
        """A fresh device with the configured initial residents; what follows is at ``position``.

        ``array(count, value)`` makes the state's sequences: lists, or arrays to compile for.
        """
        params = self.params["eviction"]
        belady, oracle = self.eviction.name == "belady", self.prefetch.name == "oracle"
        state = new_state(
            self.shape.moe_layers,
            self.shape.num_experts,
            self.shape.top_k,
            self.slots,
            staging_slots=staging_slots(self.config),
            decay=float(params.get("decay", 1.0)),
            forget=bool(params.get("forget", False)),
            seed=self.config.trace.seed,
            hot=self.hot,
            future=self.text.future_uses(self.requests) if belady else None,
            position=position,
            routes_ahead=self.text.flat_target.ravel() if oracle else (),
            accepted_run=self.text.accepted_runs if belady or oracle else (),
            array=array,
        )
        fill(state, self.config.memory.initial, self.slots, self.hot, self.text.popularity)
        return state


def resolve(config: RunConfig) -> Setup:
    """Load and check everything a configuration names. Raises UsageError on the impossible."""
    eviction, prefetch, depth = policies_of(config)
    params = {
        "eviction": params_of(eviction, config.policy.eviction_params),
        "prefetch": params_of(prefetch, config.policy.prefetch_params),
        "depth": params_of(depth, config.policy.depth_params),
    }
    drafts = depth.name != "never" and params["depth"].get("depth") != 0
    check_policies(config, eviction, prefetch, drafts)
    shape, machine = find_model(config.model), machine_of(config)
    text = text_of(config, shape, drafts)
    check_text(config, text, shape, drafts, "gate" in prefetch.needs)
    form, bits = ExpertForm(config.experts.form), draft_bits(config, drafts)
    sizes = expert_bytes(shape, form, bits, config.experts.group_size)
    plan = memory_plan(config, shape, machine, sizes, text.context)
    slots = slot_counts(config, shape, plan)
    check_slots(config, shape, plan)
    costs = build_costs(
        shape,
        machine,
        form,
        bits,
        config.experts.grouped,
        config.experts.group_size,
        grouped_draft=config.experts.grouped_draft,
        captured_draft=config.experts.captured_draft,
    )
    unions = text.unions if "costs" in depth.needs else ()
    rules = Rules(
        eviction.rule,
        prefetch.rule,
        depth.rule,
        prefetch_memory(prefetch, params["prefetch"], costs.load_bytes),
        depth_memory(
            depth,
            params["depth"],
            lambda most: expected_by_costs(most, unions, shape, machine, costs, text.context),
        ),
    )
    notes = (
        *text_notes(config, text, drafts),
        sizes.note,
        device_note(plan, machine),
        host_note(plan, machine.host),
    )
    return Setup(
        config,
        text,
        text.requests,
        shape,
        machine,
        costs,
        plan,
        slots,
        eviction,
        prefetch,
        depth,
        params,
        hot_set(prefetch, eviction, params["eviction"], text.popularity, slots),
        rules,
        tuple(note for note in notes if note),
    )
