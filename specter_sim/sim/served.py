"""One request served in the SimPy world, and its report in the form of every engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_sim.bound import least_loads_of_run
from specter_sim.offload.decode import StallCause, Window
from specter_sim.setup import Request, Setup
from specter_sim.sim.account import Decoded


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


def decoded_of(setup: Setup, request: Request, served: Served) -> Decoded:
    """The request's windows as arrays, and the loads no schedule could have avoided."""
    return decoded(
        served,
        least_loads_of_run(
            served.unions,
            setup.slots,
            setup.shape.moe_layers,
            setup.shape.num_experts,
            served.resident,
        ),
        _least_compute_s(setup, request, served),
    )


def decoded(served: Served, least_loads: int, least_compute_s: float) -> Decoded:
    """A served request with its windows as arrays."""
    windows = served.windows
    stall_s = {cause: 0.0 for cause in StallCause}
    for window in windows:
        for stall in window.stalls:
            stall_s[stall.cause] += stall.seconds
    return Decoded(
        served.began_s,
        served.start_s,
        np.array([window.began_s for window in windows]),
        np.array([window.ended_s for window in windows]),
        np.array([window.outcome.depth for window in windows]),
        np.array([window.outcome.accepted for window in windows]),
        stall_s,
        served.counts,
        served.draft_s,
        served.compute_s,
        least_loads,
        least_compute_s,
    )


def _least_compute_s(setup: Setup, request: Request, served: Served) -> float:
    """The windows' GPU seconds with every layer's experts run in one go."""
    costs, layers = setup.costs, setup.shape.moe_layers
    cached, seconds = request.context + request.start - request.begin, 0.0
    for number, window in enumerate(served.windows):
        depth = window.outcome.depth
        tokens = depth + 1
        for step in range(1, tokens):
            seconds += costs.draft_step_s(cached + step)
        seconds += layers * costs.layer_s(tokens, cached + tokens)
        for union in served.unions[number * layers : (number + 1) * layers]:
            seconds += costs.experts_s(len(union), tokens * setup.shape.top_k)
        seconds += costs.fixed_s(tokens, cached)
        cached += window.outcome.accepted + 1
    return seconds
