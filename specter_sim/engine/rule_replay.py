"""Hit-only replays by the rule functions themselves, compiled: any eviction rule, rows at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_sim.engine.block import Block
from specter_sim.engine.block_type import block_at
from specter_sim.engine.compile import register
from specter_sim.engine.replay_kernels import Places, compiled
from specter_sim.policies import EVICTION
from specter_sim.policies.eviction import belady, fifo, least_stale, lfu, lru, random
from specter_sim.policies.state import new_state
from specter_sim.replay import replay_rows
from specter_sim.setup.text import flat_indices
from specter_traces import Trace

register()

Flat = Any  # a numpy array, which compiled code indexes like any sequence


def rule_hits(trace: Trace, policy: str, slots: int, warm: bool) -> NDArray[np.int64]:
    """Hits of each layer, [L], with ``slots`` slots a layer: what ``replay_batched`` counts.

    Parameters of the rule have their defaults. The device is empty where a sequence starts,
    unless ``warm``.

    Raises KeyError for a policy that needs more than the target's routes.
    """
    block = _block(trace, policy, slots)
    hits = np.zeros(trace.num_layers, dtype=np.int64)
    ids = np.ascontiguousarray(np.sort(trace.target_ids, axis=2), dtype=np.uint16).reshape(-1)
    start = {k: v.copy() for k, v in block.arrays.items() if k not in ("future", "future_begin")}
    offsets = trace.sequence_offsets.tolist()
    for first, last in pairwise(offsets):
        if not warm:
            for name, values in start.items():
                np.copyto(block.arrays[name], values)
        _REPLAYS[policy](block.address, ids, first, last, hits)
    return hits


def _block(trace: Trace, policy: str, slots: int) -> Block:
    params = {name: param.default for name, param in EVICTION[policy].params.items()}
    state = new_state(
        trace.num_layers,
        trace.num_experts,
        trace.top_k,
        [slots] * trace.num_layers,
        decay=float(params.get("decay", 1.0)),
        seed=int(params.get("seed", 0)),
    )
    fields: dict[str, Any] = state._asdict() | {"waiting": np.zeros(trace.num_experts)}
    if "future" in EVICTION[policy].needs:
        begin, positions = _uses(trace)
        # Sought at every access, because it always lies behind.
        passed = np.full(trace.num_layers * trace.num_experts, -1)
        fields |= {"future_begin": begin, "future": positions, "next_use": passed}
    return Block(fields)


def _uses(trace: Trace) -> tuple[Places, Places]:
    """When every expert is used: slices by flat index, and ascending positions."""
    flat = flat_indices(trace, trace.target_ids)
    positions = np.repeat(np.arange(len(flat)), flat.shape[1])
    counts = np.bincount(flat.ravel(), minlength=trace.num_layers * trace.num_experts)
    order = np.argsort(flat.ravel(), kind="stable")
    return np.concatenate([[0], np.cumsum(counts)]), positions[order]


@compiled
def _lru(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, lru, ids, first, last, e.waiting, hits)


@compiled
def _fifo(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, fifo, ids, first, last, e.waiting, hits)


@compiled
def _lfu(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, lfu, ids, first, last, e.waiting, hits)


@compiled
def _random(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, random, ids, first, last, e.waiting, hits)


@compiled
def _least_stale(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, least_stale, ids, first, last, e.waiting, hits)


@compiled
def _belady(address: int, ids: Flat, first: int, last: int, hits: Flat) -> None:
    e = block_at(address)
    replay_rows(e, belady, ids, first, last, e.waiting, hits)


_REPLAYS = {
    "lru": _lru,
    "fifo": _fifo,
    "lfu": _lfu,
    "random": _random,
    "least-stale": _least_stale,
    "belady": _belady,
}
POLICIES = tuple(_REPLAYS)
"""The policies that need nothing but the target's routes."""
