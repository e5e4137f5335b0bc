"""Every statistic of one trace in one record, for tables, plots and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from specter_traces import statistics as stats
from specter_traces.header import Header
from specter_traces.statistics import Acceptance, Fidelity, Floats
from specter_traces.trace import Trace

LAGS = (1, 2, 4, 8, 16, 32)
DEPTHS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Summary:
    """A trace's statistics; the axes are those of `specter_traces.statistics`.

    `draft`, `recall_by_distance`, `acceptance` and `survival` are None without a draft, `gate`
    without gate predictions.
    """

    header: Header
    num_positions: int
    num_sequences: int
    popularity: Floats
    entropy_bits: Floats
    lags: tuple[int, ...]
    overlap_by_lag: Floats  # [lags, L]
    window_lengths: tuple[int, ...]
    union_growth: Floats  # [lengths, L]
    repetition: Floats
    draft: Fidelity | None = None
    distances: tuple[int, ...] = stats.DISTANCES
    recall_by_distance: Floats | None = None
    depths: tuple[int, ...] = DEPTHS
    acceptance: Acceptance | None = None
    survival: Floats | None = None
    gate: Fidelity | None = None

    @property
    def uniform_overlap(self) -> float:
        """Experts that two positions would share under uniform routing."""
        return self.header.top_k**2 / self.header.num_experts

    def uniform_union(self, length: float | Floats) -> Floats:
        """Return the experts that `length` positions would need under uniform routing."""
        experts, top_k = self.header.num_experts, self.header.top_k
        return np.asarray(experts * (1.0 - (1.0 - top_k / experts) ** np.asarray(length)))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values; what is not known is null."""
        document = _plain(self)
        assert isinstance(document, dict)
        return {"marks": list(self.header.marks), **document}


def summarize(trace: Trace) -> Summary:
    """Measure a trace. Costs seconds for some hundred thousand positions."""
    paired = trace.is_paired
    return Summary(
        header=trace.header,
        num_positions=trace.num_positions,
        num_sequences=trace.num_sequences,
        popularity=stats.popularity(trace),
        entropy_bits=stats.layer_entropy(trace),
        lags=LAGS,
        overlap_by_lag=np.array([stats.adjacent_overlap(trace, lag) for lag in LAGS]),
        window_lengths=stats.WINDOW_LENGTHS,
        union_growth=stats.union_growth(trace),
        repetition=stats.repetition(trace),
        draft=stats.fidelity(trace) if paired else None,
        recall_by_distance=stats.fidelity_by_distance(trace) if paired else None,
        acceptance=stats.acceptance(trace) if paired else None,
        survival=stats.survival(trace, DEPTHS) if paired else None,
        gate=stats.gate_fidelity(trace) if trace.gate_ids is not None else None,
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
