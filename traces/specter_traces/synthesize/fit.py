"""Learning a synthetic router from a recorded trace; the method is told in the package text."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from specter_traces import statistics as stats
from specter_traces.columns import narrow_ids
from specter_traces.synthesize.scores import MEMORIES, Floats, best_experts
from specter_traces.trace import Trace

_LAGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
_ANGLES = np.array(
    [1.0, 0.92, 0.84, 0.76, 0.68, 0.6, 0.52, 0.44, 0.36, 0.28, 0.2, 0.12, 0.06, 0.02]
)
"""Square roots of 1 - correlation: near 1, shared experts fall off evenly in them."""
_MOST_ANCHORS = 16
_PAIRS = 1500


@dataclass(frozen=True)
class Anchor:
    """The generator's parameters for the layers around one relative depth.

    `constants` [E] by popularity rank; `memories` [components] are shares of the variance;
    correlations of the draft's score with the target's when its proposal is kept and not, and of
    the gate's (None without that column).
    """

    constants: Floats
    memories: Floats
    draft: tuple[float, float] | None
    gate: float | None


@dataclass(frozen=True)
class RouteCurve:
    """Mean experts shared by two routes whose scores correlate, at `_ANGLES`."""

    shared: Floats
    top_k: int

    def correlation(self, shared: float | Floats) -> Floats:
        """Return the correlation at which routes share so many experts, 0 to 1."""
        rising = np.maximum.accumulate(np.append(self.shared, self.top_k))
        angle = np.interp(shared, rising, np.append(_ANGLES, 0.0))
        return np.asarray(1.0 - angle * angle, np.float64)


def fit(
    trace: Trace, num_layers: int, num_experts: int, top_k: int, generator: np.random.Generator
) -> list[Anchor]:
    """Return the parameters of each group of layers, shallow to deep."""
    source = _SourceStatistics.of(trace)
    count = min(_MOST_ANCHORS, num_layers)
    anchors = []
    for index in range(count):
        depth = (index + 0.5) / count
        noise = generator.standard_normal((2, _PAIRS, num_experts))
        constants = _fit_constants(source.popularity_at(depth, num_experts, top_k), top_k, noise[0])
        curve = _measure_curve(constants, top_k, noise)
        anchors.append(source.anchor(depth, constants, curve, num_experts, top_k))
    return anchors


def _fit_constants(target: Floats, top_k: int, noise: Floats) -> Floats:
    """Return score constants under which expert use comes out as `target` [E], sum K."""
    quantile = np.vectorize(NormalDist().inv_cdf)
    wanted: Floats = quantile(np.clip(target, 1e-4, 1 - 1e-4))
    constants = wanted.copy()
    for _ in range(6):
        routes = best_experts(constants + noise, top_k)
        used = np.bincount(routes.reshape(-1), minlength=len(target)) / len(noise)
        constants += 0.7 * (wanted - quantile(np.clip(used, 1e-4, 1 - 1e-4)))
    centred: Floats = constants - constants.mean()
    return centred


def _measure_curve(constants: Floats, top_k: int, noise: Floats) -> RouteCurve:
    first = best_experts(constants + noise[0], top_k)
    shared = [
        stats.shared_experts(
            narrow_ids(first, len(constants)),
            narrow_ids(
                best_experts(constants + r * noise[0] + np.sqrt(1 - r * r) * noise[1], top_k),
                len(constants),
            ),
        ).mean()
        for r in 1.0 - _ANGLES**2
    ]
    return RouteCurve(np.array(shared), top_k)


@dataclass(frozen=True)
class _SourceStatistics:
    """What is carried over from the source, each by source layer; overlaps as normalised."""

    popularity: Floats  # [L, E] sorted, most used first, relative to the mean
    overlap: Floats  # [lags, L]
    lags: tuple[int, ...]
    draft_recall: Floats | None  # [2, L]: kept, rejected
    gate_recall: Floats | None  # [L], layer 0 as layer 1

    @classmethod
    def of(cls, trace: Trace) -> _SourceStatistics:
        """Measure a trace."""
        used = -np.sort(-_lasting_popularity(trace), axis=1)
        lags = [lag for lag in _LAGS if len(stats.starts_of(trace, lag + 1)) >= 100] or [1]
        overlap = np.array([stats.adjacent_overlap(trace, lag) for lag in lags])
        floor = stats.uniform_overlap(trace)
        gate = None
        if trace.gate_ids is not None and trace.num_layers > 1:
            recall = stats.gate_fidelity(trace).recall
            gate = np.concatenate([recall[:1], recall])
        return cls(
            popularity=used * trace.num_experts / trace.top_k,
            overlap=(overlap - floor) / max(trace.top_k - floor, 1e-9),
            lags=tuple(lags),
            draft_recall=_recall_by_agreement(trace) if trace.is_paired else None,
            gate_recall=gate,
        )

    def popularity_at(self, depth: float, num_experts: int, top_k: int) -> Floats:
        """Return the use of each of `num_experts` experts by rank, sum `top_k`, none above 1."""
        layer = self._layer(depth)
        source = (np.arange(self.popularity.shape[1]) + 0.5) / self.popularity.shape[1]
        share = np.interp(
            (np.arange(num_experts) + 0.5) / num_experts, source, self.popularity[layer]
        )
        return _scaled_to(np.maximum(share, 1e-4), top_k)

    def anchor(
        self, depth: float, constants: Floats, curve: RouteCurve, num_experts: int, top_k: int
    ) -> Anchor:
        """Return the parameters of a layer at a relative depth."""
        layer = self._layer(depth)
        floor = top_k * top_k / num_experts
        wanted = curve.correlation(floor + self.overlap[:, layer] * (top_k - floor))
        draft = gate = None
        if self.draft_recall is not None:
            kept, rejected = curve.correlation(self.draft_recall[:, layer] * top_k)
            draft = (float(kept), float(rejected))
        if self.gate_recall is not None:
            gate = float(curve.correlation(float(self.gate_recall[layer]) * top_k))
        return Anchor(constants, _mix_memories(np.array(self.lags), wanted), draft, gate)

    def _layer(self, depth: float) -> int:
        return min(int(depth * len(self.popularity)), len(self.popularity) - 1)


def _lasting_popularity(trace: Trace) -> Floats:
    """Return expert use [L, E] without what only a sequence's own topic made popular.

    The squared deviations from uniform use are those that sequences have in common: the part of
    a sequence's own is the work of long memories, which the generator adds again.
    """
    used = stats.popularity(trace)
    if trace.num_sequences < 2:
        return used
    lengths = np.diff(trace.sequence_offsets).astype(np.float64)
    own = np.zeros(trace.num_layers)
    for length, part in zip(lengths, trace, strict=True):
        own += length**2 * (stats.popularity(part) ** 2).sum(axis=1)
    total = lengths.sum() ** 2
    between = (total * (used**2).sum(axis=1) - own) / (total - (lengths**2).sum())
    even = trace.top_k / trace.num_experts
    deviation = ((used - even) ** 2).sum(axis=1)
    kept = (between - trace.top_k * even) / np.maximum(deviation, 1e-12)
    lasting: Floats = even + (used - even) * np.sqrt(np.clip(kept, 0.0, 1.0))[:, None]
    return lasting


def _recall_by_agreement(trace: Trace) -> Floats:
    """Return the draft's recall by layer where its proposal is kept and where not, [2, L]."""
    assert trace.draft_ids is not None
    shared = stats.shared_experts(trace.target_ids, trace.draft_ids) / trace.top_k
    agree = stats.agreement(trace)
    overall = shared.mean(axis=0)
    return np.stack(
        [shared[side].mean(axis=0) if side.sum() >= 20 else overall for side in (agree, ~agree)]
    )


def _scaled_to(share: Floats, total: float) -> Floats:
    """Scale positive shares to a sum, capping each at 1."""
    scaled = share * (total / share.sum())
    for _ in range(50):
        capped: Floats = np.minimum(scaled, 1.0)
        missing = total - capped.sum()
        if missing < 1e-9:
            break
        free = capped < 1.0
        scaled = np.where(free, capped * (1 + missing / max(capped[free].sum(), 1e-12)), 1.0)
    return np.asarray(np.minimum(scaled, 1.0), np.float64)


def _mix_memories(lags: NDArray[np.int64], wanted: Floats) -> Floats:
    """Return shares of the memories, sum 1, whose correlation at `lags` is nearest `wanted`."""
    basis = MEMORIES[None, :] ** lags[:, None]
    shares = np.full(len(MEMORIES), 1.0 / len(MEMORIES))
    ahead, pace = shares, 1.0
    step = 1.0 / np.linalg.norm(basis, 2) ** 2
    # Projected gradient descent with Nesterov's momentum.
    for _ in range(400):
        nearer = _onto_simplex(ahead - step * basis.T @ (basis @ ahead - wanted))
        faster = (1.0 + np.sqrt(1.0 + 4.0 * pace * pace)) / 2.0
        ahead = nearer + (pace - 1.0) / faster * (nearer - shares)
        shares, pace = nearer, faster
    return shares


def _onto_simplex(values: Floats) -> Floats:
    """Return the nearest shares that are not negative and sum to 1."""
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1.0) / np.arange(1, len(values) + 1)
    nearest: Floats = np.maximum(values - excess[np.count_nonzero(ordered > excess) - 1], 0.0)
    return nearest
