"""A cost model of this runtime on this machine, fitted to single timings of a live run.

The simulator's closed forms describe a GPU. A prediction of what this process will take needs what
its forwards, experts and decisions take here; the fit is linear in tokens, experts and routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from specter_runtime.devices import DeviceKind
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.options import SessionOptions
from specter_runtime.prepare import plan
from specter_runtime.session import Session
from specter_runtime.stopwatch import Samples
from specter_sim.config import RunConfig, build
from specter_sim.hardware import Costs
from specter_sim.hardware.costs import Roofline
from specter_traces.errors import SpecterError

DEPTHS = (0, 3, 8)
TOKENS, WARM_UP_TOKENS = 48, 8
"""Tokens decoded at each depth, timed and before."""

_NOTHING = Roofline(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Calibration:
    """Costs as fitted, and how much faster and slower the middle half of the timings was.

    Attributes:
        fast, slow: factors on every compute cost, the quartiles of measured / fitted.
    """

    costs: Costs
    fast: float
    slow: float

    def scaled(self, factor: float) -> Costs:
        """Every compute cost times `factor`."""
        c = self.costs
        return replace(
            c,
            draft=_times(c.draft, factor),
            layer=_times(c.layer, factor),
            route_s=c.route_s * factor,
            group_launch_s=c.group_launch_s * factor,
            expert_launch_s=c.expert_launch_s * factor,
        )


def calibrate(
    loaded: LoadedModel, config: RunConfig, options: SessionOptions, prompt: Sequence[int]
) -> Calibration:
    """Decode a short text at some depths without pacing, and fit costs to its timings.

    Half of the experts have slots, so that experts are applied in parts, too.
    """
    samples = Samples()
    for depth in DEPTHS:
        settings = {"experts": config.experts.model_dump(), "policy": {"depth": depth}}
        unpaced = replace(options, device=DeviceKind.IMMEDIATE, faults=None, journal=False)
        session = Session(plan(loaded, build(settings), unpaced))
        with session:
            list(session.generate(prompt, WARM_UP_TOKENS))
            session.model.stopwatch.samples = samples
            list(session.generate(prompt, TOKENS))
    load_bytes = int(loaded.store.load_bytes)
    return fit(samples, loaded.store.layers, load_bytes, load_bytes)


def fit(samples: Samples, layers: int, load_bytes: int, slot_bytes: int) -> Calibration:
    """Costs of a model with `layers` MoE layers. SpecterError without timings to fit to."""
    if not samples.passes or not samples.runs:
        raise SpecterError("a calibration needs timings of a decoded text: there are none")
    passes = np.array([(1.0, tokens) for tokens, _, _ in samples.passes])
    pass_s = np.array([compute_s + rest_s for _, compute_s, rest_s in samples.passes])
    floor_s, token_s = _robust(passes, pass_s)
    runs = np.array([(1.0, experts, routes) for experts, routes, _ in samples.runs])
    run_s = np.array([seconds for _, _, seconds in samples.runs])
    call_s, expert_s, route_s = _robust(runs, run_s)
    draft_s = float(np.median(samples.drafts)) if samples.drafts else float("inf")
    costs = Costs(
        draft=_constant(draft_s),
        layer=Roofline(token_s / layers, 0.0, 0.0, 0.0, floor_s / layers, 0.0, 0.0),
        dense=_NOTHING,
        end=_NOTHING,
        route_s=route_s,
        use_s=0.0,
        group_launch_s=call_s,
        expert_launch_s=expert_s,
        expand_per_use_s=0.0,
        expand_per_load_s=0.0,
        load_bytes=load_bytes,
        slot_bytes=slot_bytes,
        has_draft=bool(samples.drafts),
    )
    ratios = pass_s / (passes @ np.array([floor_s, token_s]))
    fast, slow = np.percentile(ratios, [25, 75])
    return Calibration(costs, float(fast), float(slow))


def _robust(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> Sequence[float]:
    """Non-negative coefficients; the slowest tenth, disturbed by others, is fitted without."""
    weights, _ = nnls(features, seconds)
    excess = seconds - features @ weights
    calm = excess <= np.quantile(excess, 0.9)
    fitted: list[float] = nnls(features[calm], seconds[calm])[0].tolist()
    return fitted


def _constant(seconds: float) -> Roofline:
    return Roofline(0.0, 0.0, 0.0, 0.0, seconds, 0.0, 0.0)


def _times(roofline: Roofline, factor: float) -> Roofline:
    return replace(roofline, token_s=roofline.token_s * factor, floor_s=roofline.floor_s * factor)
