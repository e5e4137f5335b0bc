"""Turn what happened into the metrics of design: one formula each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specter_sim.bound import least_loads
from specter_sim.offload.decode import StallCause, Window
from specter_sim.policies.state import (
    DEMAND_LOADS,
    EVICTIONS,
    HITS,
    LATE,
    MISSES,
    PENDING,
    PREFETCH_LOADS,
    USEFUL,
    WASTED,
    State,
)
from specter_sim.results import Result
from specter_sim.setup import Setup

COUNTED = {
    "hits": HITS,
    "pending_hits": PENDING,
    "misses": MISSES,
    "demand_loads": DEMAND_LOADS,
    "prefetch_loads": PREFETCH_LOADS,
    "evictions": EVICTIONS,
    "useful_prefetches": USEFUL,
    "late_prefetches": LATE,
    "wasted_prefetches": WASTED,
}


def counts_of(state: State) -> dict[str, int]:
    """The offloader's counters by name."""
    return {name: state.counters[place] for name, place in COUNTED.items()}


@dataclass(frozen=True)
class Served:
    """One request, served: its windows and what its decoding added to every counter.

    Attributes:
        began_s, start_s: when its prompt was submitted, when decoding began.
        unions: experts needed, one list per window and layer.
        resident: flat indices on the device when decoding began.
    """

    began_s: float
    start_s: float
    windows: tuple[Window, ...]
    counts: dict[str, int]
    draft_s: float
    compute_s: float
    unions: list[list[int]]
    resident: list[int]

    @property
    def committed(self) -> list[int]:
        """Tokens each window committed."""
        return [window.outcome.accepted + 1 for window in self.windows]

    @property
    def decode_s(self) -> float:
        """Seconds from the first draft to the last commit."""
        return self.windows[-1].ended_s - self.start_s


def summarize(setup: Setup, served: Sequence[Served], run_s: float, link_busy_s: float) -> Result:
    """All metrics over all requests."""
    counts = {name: sum(request.counts[name] for request in served) for name in COUNTED}
    tokens = sum(sum(request.committed) for request in served)
    times = _times(served, run_s)
    decode_s = sum(request.decode_s for request in served)
    bound_s, resource = _bound(setup, served)
    plan = setup.plan
    return Result(
        **_latencies(served, tokens),
        **times,
        tokens_per_s=tokens / decode_s,
        run_s=run_s,
        decode_s=decode_s,
        requests=len(served),
        committed_tokens=tokens,
        **_speculation(served, tokens),
        **counts,
        **_demands(counts),
        **_bytes(counts, setup.costs.load_bytes, tokens),
        link_busy_s=link_busy_s,
        bound_s=bound_s,
        bound_resource=resource,
        distance_to_bound=decode_s / bound_s if bound_s > 0 else 1.0,
        device_bytes=plan.total_bytes,
        dense_bytes=plan.dense_bytes,
        draft_bytes=plan.draft_bytes,
        slot_bytes=plan.slot_bytes,
        kv_bytes=plan.kv_bytes,
        buffer_bytes=plan.buffer_bytes,
        slots_per_layer=plan.slots_per_layer,
        host_bytes=plan.host_bytes,
        synthetic=setup.trace.header.synthetic,
        assumed_draft=setup.trace.header.assumed_draft,
        notes=setup.notes,
    )


def _latencies(served: Sequence[Served], tokens: int) -> dict[str, Any]:
    """TPOT in both definitions, its tail over tokens, and TTFT."""
    span_s = sum(r.windows[-1].ended_s - r.windows[0].ended_s for r in served)
    later = tokens - sum(r.committed[0] for r in served)
    decode_s = sum(r.decode_s for r in served)
    per_token = np.concatenate(
        [
            np.repeat((w.ended_s - w.began_s) / n, n)
            for r in served
            for w, n in zip(r.windows, r.committed, strict=True)
        ]
    )
    return {
        "tpot_s": span_s / later if later else decode_s / tokens,
        "tpot_paper_s": span_s / max(1, tokens - len(served)),
        "tpot_p50_s": float(np.percentile(per_token, 50)),
        "tpot_p99_s": float(np.percentile(per_token, 99)),
        "ttft_s": sum(r.windows[0].ended_s - r.began_s for r in served) / len(served),
    }


def _times(served: Sequence[Served], run_s: float) -> dict[str, Any]:
    """Where the run's seconds went; idle is exactly the rest."""
    stalls = {cause: 0.0 for cause in StallCause}
    for request in served:
        for window in request.windows:
            for stall in window.stalls:
                stalls[stall.cause] += stall.seconds
    prefill_s = sum(request.start_s - request.began_s for request in served)
    draft_s = sum(request.draft_s for request in served)
    compute_s = sum(request.compute_s for request in served)
    return {
        "prefill_s": prefill_s,
        "draft_s": draft_s,
        "compute_s": compute_s,
        "stall_demand_s": stalls[StallCause.DEMAND],
        "stall_late_s": stalls[StallCause.LATE],
        "stall_join_s": stalls[StallCause.JOIN],
        "idle_s": run_s - prefill_s - draft_s - compute_s - sum(stalls.values()),
    }


def _speculation(served: Sequence[Served], tokens: int) -> dict[str, Any]:
    outcomes = [window.outcome for request in served for window in request.windows]
    drafted = sum(outcome.depth for outcome in outcomes)
    accepted = sum(outcome.accepted for outcome in outcomes)
    rejections = sum(1 for outcome in outcomes if outcome.accepted < outcome.depth)
    return {
        "windows": len(outcomes),
        "mean_depth": drafted / len(outcomes),
        "acceptance": accepted / (accepted + rejections) if drafted else 0.0,
        "window_utilization": accepted / drafted if drafted else 0.0,
        "tokens_per_window": tokens / len(outcomes),
    }


def _demands(counts: dict[str, int]) -> dict[str, Any]:
    demands = counts["hits"] + counts["pending_hits"] + counts["misses"]
    return {
        "demands": demands,
        "hit_rate": counts["hits"] / demands,
        "pending_rate": counts["pending_hits"] / demands,
        "loads": counts["demand_loads"] + counts["prefetch_loads"],
    }


def _bytes(counts: dict[str, int], load_bytes: int, tokens: int) -> dict[str, Any]:
    """Bytes over the link per committed token: loads x bytes per load."""
    by_kind = {
        "demand": counts["demand_loads"],
        "useful": counts["useful_prefetches"],
        "late": counts["late_prefetches"],
        "wasted": counts["wasted_prefetches"],
    }
    split = {f"{kind}_bytes_per_token": n * load_bytes / tokens for kind, n in by_kind.items()}
    loads = counts["demand_loads"] + counts["prefetch_loads"]
    return {"bytes_per_token": loads * load_bytes / tokens, **split}


def _bound(setup: Setup, served: Sequence[Served]) -> tuple[float, str]:
    """The larger of unavoidable link seconds and the GPU's work, and which it is."""
    loads = sum(_least_loads(setup, request) for request in served)
    rate = min(setup.machine.link.bytes_per_s, setup.machine.host.memory_bytes_per_s)
    link_s = loads * setup.costs.load_bytes / rate
    gpu_s = sum(request.draft_s + request.compute_s for request in served)
    return (link_s, "link") if link_s > gpu_s else (gpu_s, "gpu")


def _least_loads(setup: Setup, request: Served) -> int:
    layers, experts = setup.shape.moe_layers, setup.shape.num_experts
    if len(setup.slots) == 1 and layers > 1:
        flat = [
            [place % layers * experts + expert for expert in union]
            for place, union in enumerate(request.unions)
        ]
        return least_loads(flat, setup.slots[0], request.resident)
    total = 0
    for layer in range(layers):
        base = layer * experts
        here = [index - base for index in request.resident if base <= index < base + experts]
        total += least_loads(request.unions[layer::layers], setup.slots[layer], here)
    return total
