"""A setup as a block: state, rules by number, costs, routes, and room for the results."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_sim.engine.block import Block
from specter_sim.engine.kernel import (
    HEAD_DONE,
    IDLE,
    NOTE_INTS,
    NUM_CLOCK,
    NUM_LINK,
    NUM_STALLS,
    NUM_TIMES,
)
from specter_sim.engine.rules import DEPTH_NUMBERS, EVICTION_NUMBERS, PREFETCH_NUMBERS
from specter_sim.setup import Setup

Fields = dict[str, Any]


def block_of(setup: Setup, journal_entries: int = 0) -> Block:
    """Everything a compiled run of this setup touches, at its start."""
    return Block(
        setup.new_state(setup.requests[0].begin, array_of)._asdict()
        | rule_fields(setup)
        | link_fields(setup)
        | cost_fields(setup)
        | text_fields(setup)
        | scratch_fields(setup)
        | bound_fields(setup)
        | result_fields(setup, journal_entries)
    )


def array_of(count: int, value: float) -> NDArray[Any]:
    """An array of equal numbers: how the compiled engine keeps a state."""
    return np.full(count, value, dtype=np.float64 if isinstance(value, float) else np.int64)


def rule_fields(setup: Setup) -> Fields:
    """The rules by number, with what they start from."""
    priors = setup.rules.prefetch_memory
    return {
        "eviction_rule": EVICTION_NUMBERS[setup.eviction.name],
        "prefetch_rule": PREFETCH_NUMBERS[setup.prefetch.name],
        "depth_rule": DEPTH_NUMBERS[setup.depth.name],
        "joins": setup.rules.prefetch.joins,
        "grouped": setup.config.experts.grouped,
        "demand_all": setup.demand_all,
        "use_gate": "gate" in setup.prefetch.needs,
        "prefetch_fields": len(priors),
        "prefetch_priors": np.array(priors, dtype=np.float64),
        "prefetch_memory": np.array(priors, dtype=np.float64),
        "depth_memory": np.array(setup.rules.depth_memory, dtype=np.float64),
    }


def link_fields(setup: Setup) -> Fields:
    """An idle link at time zero."""
    link, load_bytes = setup.machine.link, setup.costs.load_bytes
    rate = min(link.bytes_per_s, setup.machine.host.memory_bytes_per_s)
    clock = np.zeros(NUM_CLOCK)
    clock[HEAD_DONE] = IDLE
    queues = ("queue_expert", "queue_slot", "queue_kind", "queue_victim", "queue_submitted")
    return {
        "clock": clock,
        "link": np.zeros(NUM_LINK, dtype=np.int64),
        "latency_s": link.latency_s,
        "copy_s": load_bytes / rate,
        "pieces_s": link.copy_s(load_bytes) - link.latency_s - load_bytes / link.bytes_per_s,
        "queue_depth": link.queue_depth,
        **{name: np.zeros(link.queue_depth) for name in queues},
    }


def cost_fields(setup: Setup) -> Fields:
    """The cost model's scalars; a roofline is the array of its fields."""
    costs = setup.costs
    return {
        "draft_roof": astuple(costs.draft),
        "layer_roof": astuple(costs.layer),
        "dense_roof": astuple(costs.dense),
        "end_roof": astuple(costs.end),
        "route_s": costs.route_s,
        "use_s": costs.use_s,
        "group_launch_s": costs.group_launch_s,
        "expert_s": costs.expert_launch_s + costs.expand_per_use_s,
    }


def text_fields(setup: Setup) -> Fields:
    """The recorded routes; the arrays of a text are shared by all its runs."""
    text = setup.text
    rows = [(r.begin, r.prompt_tokens, r.context, r.start, r.last) for r in setup.requests]
    return {
        "target": text.sorted_target,
        "draft": text.flat_draft,
        "gate": text.gate,
        "accepted": text.accepted_runs_array,
        "requests": np.array(rows, dtype=np.int64),
    }


def scratch_fields(setup: Setup) -> Fields:
    """Working arrays, one entry an expert of a layer."""
    names = ("union", "waiting", "ready", "pending", "mark", "gate_hints")
    return {name: np.zeros(setup.shape.num_experts, dtype=np.int64) for name in names}


def bound_fields(setup: Setup) -> Fields:
    """Working arrays of the bound: the longest list it can meet is a layer's, or all layers'."""
    shape, pools = setup.shape, len(setup.slots)
    layers = shape.moe_layers if pools < shape.moe_layers else 1
    most = max(request.last - request.start for request in setup.requests)
    deepest = max_depth(setup) + 1
    ids = layers * min(most * deepest * shape.top_k, most * shape.num_experts)
    experts = ("bound_kept", "bound_until", "bound_members")
    return {
        "bound_ids": np.zeros(ids),
        "bound_next": np.zeros(ids),
        "bound_ends": np.zeros(layers * most),
        **{name: np.zeros(layers * shape.num_experts) for name in experts},
    }


def max_depth(setup: Setup) -> int:
    """The deepest draft the depth rule may choose."""
    if setup.depth.name == "governor":
        return int(setup.params["depth"]["most"])
    return int(setup.rules.depth_memory[0])


def result_fields(setup: Setup, journal_entries: int) -> Fields:
    """Room for one window a position, the times of every request, and a journal."""
    windows = sum(request.last - request.start for request in setup.requests)
    requests = len(setup.requests)
    names = ("window_position", "window_began_s", "window_ended_s", "window_depth")
    return {
        **{name: np.zeros(windows) for name in names},
        "window_accepted": np.zeros(windows),
        "window_count": np.zeros(1),
        "stall_s": np.zeros(requests * NUM_STALLS),
        "request_times": np.zeros(requests * NUM_TIMES),
        "resident": np.zeros(setup.shape.experts),
        "note_room": journal_entries,
        "note_count": np.zeros(1),
        "note_ints": np.zeros(journal_entries * NOTE_INTS),
        "note_seconds": np.zeros(journal_entries),
    }
