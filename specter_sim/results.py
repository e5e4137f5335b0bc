"""The result of one simulated or measured run: every metric of the project, defined once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Engine(StrEnum):
    """Two drivers of the same rules, whose results agree to 1e-9."""

    COMPILED = "compiled"
    SIMPY = "simpy"


class Span(NamedTuple):
    """One stretch of work on a track of the timeline."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, str | int | float]


@dataclass(frozen=True)
class Result:
    """All metrics of a run, over all its requests; decode only, where nothing else is said.

    Attributes:
        tpot_s: (last commit - first commit) / tokens committed after the first commit.
        tpot_paper_s: the same seconds / (tokens - 1), the paper's definition.
        tpot_p50_s, tpot_p99_s: window seconds per committed token, over tokens.
        ttft_s: prompt submitted to first committed token, mean over requests.
        prefill_s: seconds in prompt passes, stalls included.
        run_s: = prefill_s + draft_s + compute_s + stalls + idle_s, exactly.
        decode_s: run_s without prefill.
        acceptance: accepted / (accepted + rejections); 0 when nothing was drafted.
        window_utilization: accepted / drafted.
        demands: hits + pending_hits + misses, one per expert, layer and window.
        link_busy_s: seconds the link worked, prefill included.
        *_bytes_per_token: bytes over the link per committed token, by what became of the load.
        stall_*_s: compute waited for a demand load, a late prefetch, the join before verify.
        bound_s: no schedule decodes these windows faster from the same residents.
        distance_to_bound: decode_s / bound_s.
        host_bytes: what the host stores of the routed experts.
    """

    tpot_s: float
    tpot_paper_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    ttft_s: float
    prefill_s: float
    tokens_per_s: float
    run_s: float
    decode_s: float
    requests: int
    committed_tokens: int
    windows: int
    mean_depth: float
    acceptance: float
    window_utilization: float
    tokens_per_window: float
    demands: int
    hits: int
    pending_hits: int
    misses: int
    hit_rate: float
    pending_rate: float
    loads: int
    demand_loads: int
    prefetch_loads: int
    evictions: int
    useful_prefetches: int
    late_prefetches: int
    wasted_prefetches: int
    bytes_per_token: float
    demand_bytes_per_token: float
    useful_bytes_per_token: float
    late_bytes_per_token: float
    wasted_bytes_per_token: float
    draft_s: float
    compute_s: float
    stall_demand_s: float
    stall_late_s: float
    stall_join_s: float
    idle_s: float
    link_busy_s: float
    bound_s: float
    bound_resource: str
    distance_to_bound: float
    device_bytes: int
    dense_bytes: int
    draft_bytes: int
    slot_bytes: int
    kv_bytes: int
    buffer_bytes: int
    slots_per_layer: float
    host_bytes: int
    synthetic: bool
    assumed_draft: bool
    notes: tuple[str, ...]

    def row(self) -> dict[str, str | int | float | bool]:
        """Flat scalars for a table; notes joined with "; "."""
        return {**vars(self), "notes": "; ".join(self.notes)}
