"""Turn what happened into metrics: one formula each, whichever engine it happened in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_sim.hardware import MemoryPlan
from specter_sim.offload.decode import StallCause
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
class Decoded:
    """One request as every engine reports it: its windows as arrays, its totals.

    Attributes:
        began_s, start_s: when its prompt was submitted, when decoding began.
        window_began_s, window_ended_s, depth, accepted: [windows].
        stall_s: seconds compute waited, by cause.
        counts: what its decoding added to every counter.
        least_loads: loads that no schedule can avoid for these windows.
        least_compute_s: GPU seconds that none can avoid: every layer's experts in one go.
    """

    began_s: float
    start_s: float
    window_began_s: NDArray[np.float64]
    window_ended_s: NDArray[np.float64]
    depth: NDArray[np.int64]
    accepted: NDArray[np.int64]
    stall_s: Mapping[StallCause, float]
    counts: Mapping[str, int]
    draft_s: float
    compute_s: float
    least_loads: int
    least_compute_s: float

    @property
    def committed(self) -> NDArray[np.int64]:
        """Tokens each window committed."""
        return self.accepted + 1

    @property
    def decode_s(self) -> float:
        """Seconds from the first draft to the last commit."""
        return float(self.window_ended_s[-1]) - self.start_s


@dataclass(frozen=True)
class Conditions:
    """What a run's metrics need to know of it beyond what happened.

    Attributes:
        load_bytes: bytes of one load.
        link_bytes_per_s: what the link moves at most; its bound.
    """

    plan: MemoryPlan
    load_bytes: float
    link_bytes_per_s: float
    synthetic: bool = False
    assumed_draft: bool = False
    notes: tuple[str, ...] = ()


def conditions_of(setup: Setup) -> Conditions:
    """The conditions of a simulated run."""
    return Conditions(
        setup.plan,
        setup.costs.load_bytes,
        min(setup.machine.link.bytes_per_s, setup.machine.host.memory_bytes_per_s),
        setup.trace.header.synthetic,
        setup.trace.header.assumed_draft,
        setup.notes,
    )


def summarize(
    conditions: Conditions, requests: Sequence[Decoded], run_s: float, link_busy_s: float
) -> Result:
    """All metrics over all requests."""
    counts = {name: sum(request.counts[name] for request in requests) for name in COUNTED}
    tokens = sum(int(request.committed.sum()) for request in requests)
    decode_s = sum(request.decode_s for request in requests)
    bound_s, resource = _bound(conditions, requests)
    plan = conditions.plan
    return Result(
        **_latencies(requests, tokens),
        **_times(requests, run_s),
        tokens_per_s=tokens / decode_s,
        run_s=run_s,
        decode_s=decode_s,
        requests=len(requests),
        committed_tokens=tokens,
        **_speculation(requests, tokens),
        **counts,
        **_demands(counts),
        **_bytes(counts, conditions.load_bytes, tokens),
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
        synthetic=conditions.synthetic,
        assumed_draft=conditions.assumed_draft,
        notes=conditions.notes,
    )


def _latencies(requests: Sequence[Decoded], tokens: int) -> dict[str, Any]:
    """TPOT in both definitions, its tail over tokens, and TTFT."""
    span_s = sum(float(r.window_ended_s[-1] - r.window_ended_s[0]) for r in requests)
    later = tokens - sum(int(r.committed[0]) for r in requests)
    decode_s = sum(r.decode_s for r in requests)
    per_token = np.concatenate(
        [
            np.repeat((r.window_ended_s - r.window_began_s) / r.committed, r.committed)
            for r in requests
        ]
    )
    return {
        "tpot_s": span_s / later if later else decode_s / tokens,
        "tpot_paper_s": span_s / max(1, tokens - len(requests)),
        "tpot_p50_s": float(np.percentile(per_token, 50)),
        "tpot_p99_s": float(np.percentile(per_token, 99)),
        "ttft_s": sum(float(r.window_ended_s[0]) - r.began_s for r in requests) / len(requests),
    }


def _times(requests: Sequence[Decoded], run_s: float) -> dict[str, Any]:
    """Where the run's seconds went; idle is exactly the rest."""
    stalls = {cause: sum(r.stall_s[cause] for r in requests) for cause in StallCause}
    prefill_s = sum(r.start_s - r.began_s for r in requests)
    draft_s = sum(r.draft_s for r in requests)
    compute_s = sum(r.compute_s for r in requests)
    return {
        "prefill_s": prefill_s,
        "draft_s": draft_s,
        "compute_s": compute_s,
        "stall_demand_s": stalls[StallCause.DEMAND],
        "stall_late_s": stalls[StallCause.LATE],
        "stall_join_s": stalls[StallCause.JOIN],
        "idle_s": run_s - prefill_s - draft_s - compute_s - sum(stalls.values()),
    }


def _speculation(requests: Sequence[Decoded], tokens: int) -> dict[str, Any]:
    windows = sum(len(r.depth) for r in requests)
    drafted = sum(int(r.depth.sum()) for r in requests)
    accepted = sum(int(r.accepted.sum()) for r in requests)
    rejections = sum(int(np.count_nonzero(r.accepted < r.depth)) for r in requests)
    return {
        "windows": windows,
        "mean_depth": drafted / windows,
        "acceptance": accepted / (accepted + rejections) if drafted else 0.0,
        "window_utilization": accepted / drafted if drafted else 0.0,
        "tokens_per_window": tokens / windows,
    }


def _demands(counts: dict[str, int]) -> dict[str, Any]:
    demands = counts["hits"] + counts["pending_hits"] + counts["misses"]
    return {
        "demands": demands,
        "hit_rate": counts["hits"] / demands,
        "pending_rate": counts["pending_hits"] / demands,
        "loads": counts["demand_loads"] + counts["prefetch_loads"],
    }


def _bytes(counts: dict[str, int], load_bytes: float, tokens: int) -> dict[str, Any]:
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


def _bound(conditions: Conditions, requests: Sequence[Decoded]) -> tuple[float, str]:
    """The larger of the link's and the GPU's unavoidable seconds, and whose they are.

    It holds for the windows that were decoded, whose depths it takes as given, and from the
    residents that decoding began with.
    """
    loads = sum(request.least_loads for request in requests)
    link_s = loads * conditions.load_bytes / conditions.link_bytes_per_s
    gpu_s = sum(request.least_compute_s for request in requests)
    return (link_s, "link") if link_s > gpu_s else (gpu_s, "gpu")
