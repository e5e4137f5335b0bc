"""A draft that nobody recorded, for traces that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specter_traces import statistics as stats
from specter_traces.columns import narrow_ids
from specter_traces.errors import UsageError, refuse_seed
from specter_traces.synthesize.scores import Floats, best_experts
from specter_traces.trace import IdArray, Trace

_CHUNK = 256
_ROWS_CALIBRATED = 3000


def with_assumed_draft(trace: Trace, acceptance: float, recall: float, seed: int) -> Trace:
    """Return the trace with a draft that nobody recorded, marked as assumed.

    `acceptance` is the mean probability that a proposal is kept (greedy or sampled), `recall` the
    mean share of the target's experts that the draft names; positions with doubtful proposals
    get more route errors, and the errors fall on low ranks. Raises UsageError for numbers
    outside 0 to 1, and for a trace that has a draft.
    """
    _check_assumption(trace, acceptance, recall)
    refuse_seed(seed)
    generator = np.random.default_rng(seed)
    probability = _assumed_probability(acceptance, trace.num_positions, generator)
    agree = generator.random(trace.num_positions) < probability
    wrong = _route_errors(trace, 1.0 - recall, probability, acceptance, generator)
    known = trace.next_tokens is not None and bool((trace.next_tokens >= 0).any())
    tokens = trace.target_tokens
    if tokens is None:
        tokens = np.zeros(trace.num_positions, np.int32)
    header = replace(
        trace.header,
        assumed_draft=True,
        draft=None,
        notes=(
            *trace.header.notes,
            f"draft assumed: acceptance {acceptance:g}, recall {recall:g}, seed {seed}",
        ),
    )
    return replace(
        trace,
        header=header,
        draft_ids=_with_errors(trace, wrong, generator),
        draft_weights=trace.target_weights,
        next_tokens=trace.next_tokens if known else np.full(trace.num_positions, -1, np.int32),
        target_tokens=tokens,
        # Any other token is as good: only its difference from the target's is ever read.
        draft_tokens=np.where(agree, tokens, tokens + 1).astype(np.int32),
        accept_prob=probability.astype(np.float16),
    ).sealed()


def _check_assumption(trace: Trace, acceptance: float, recall: float) -> None:
    for name, value in (("acceptance", acceptance), ("recall", recall)):
        if not 0.0 <= value <= 1.0:
            raise UsageError(f"an assumed {name} lies between 0 and 1, got {value}")
    if trace.is_paired:
        raise UsageError(f"trace {trace.header.name!r} has a draft of its own: nothing to assume")
    if trace.num_experts < 2 * trace.top_k and recall < 2 - trace.num_experts / trace.top_k:
        raise UsageError(
            f"{trace.top_k} of {trace.num_experts} experts always share some: recall is at least "
            f"{2 - trace.num_experts / trace.top_k:.2f}, got {recall}"
        )


def _assumed_probability(mean: float, count: int, generator: np.random.Generator) -> Floats:
    """Return probabilities with this mean, most near 0 or 1 as measured drafts' are."""
    if mean in (0.0, 1.0):
        return np.full(count, mean)
    drawn = generator.beta(2.0 * mean, 2.0 * (1.0 - mean), count)
    return np.asarray(drawn, np.float64)


def _route_errors(
    trace: Trace,
    rate: float,
    probability: Floats,
    acceptance: float,
    generator: np.random.Generator,
) -> NDArray[np.bool_]:
    """Return which of the target's experts the draft does not name, [T, L, K]; mean `rate`."""
    doubt = 0.5 + 0.5 * (1.0 - probability) / max(1.0 - acceptance, 1e-9)
    ranks = np.arange(1, trace.top_k + 1) ** 2.0
    chance = (doubt[:, None] * ranks[None, :]).astype(np.float64)
    drawn = generator.random(trace.target_ids.shape, np.float32)
    spare = trace.num_experts - trace.top_k
    some = slice(None, None, max(1, len(drawn) // _ROWS_CALIBRATED))
    low, high = 0.0, 1.0 / max(float(chance.min()), 1e-9)
    for _ in range(40):
        middle = (low + high) / 2
        if _errors(drawn[some], middle * chance[some], spare).mean() < rate:
            low = middle
        else:
            high = middle
    return _errors(drawn, high * chance, spare)


def _errors(drawn: NDArray[np.float32], chance: Floats, spare: int) -> NDArray[np.bool_]:
    """Return where a draw [T, L, K] falls below its chance [T, K]; at most `spare` a row.

    No more errors than there are other experts: the highest ranks lose theirs.
    """
    wrong: NDArray[np.bool_] = drawn < chance[:, None, :]
    if spare < drawn.shape[-1]:
        from_last = np.cumsum(wrong[..., ::-1], axis=-1)[..., ::-1]
        wrong &= from_last <= spare
    return wrong


def _with_errors(trace: Trace, wrong: NDArray[np.bool_], generator: np.random.Generator) -> IdArray:
    """Return the target's routes, the wrong experts replaced by popular ones not needed."""
    ids = trace.target_ids.astype(np.int64)
    weights = np.log(np.maximum(stats.popularity(trace), 1e-4)).astype(np.float32)
    for start in range(0, len(ids), _CHUNK):
        part = ids[start : start + _CHUNK]
        keys = weights + generator.gumbel(size=(len(part), *weights.shape)).astype(np.float32)
        np.put_along_axis(keys, part, -np.inf, axis=-1)
        room = min(trace.top_k, trace.num_experts - trace.top_k)
        if room:
            others = best_experts(keys, room)
            fill = np.take_along_axis(
                others, np.minimum(np.cumsum(wrong[start : start + _CHUNK], axis=-1), room) - 1, -1
            )
            ids[start : start + _CHUNK] = np.where(wrong[start : start + _CHUNK], fill, part)
    return narrow_ids(ids, trace.num_experts)
