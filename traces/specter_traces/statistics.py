"""What a trace shows about routing: locality, skew, and how well a draft foretells it.

Functions return arrays indexed by layer, so that a reader can average or plot them. Pairs and
windows never cross from one sequence into the next. Overlaps are counted in experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.errors import UsageError
from specter_traces.trace import IdArray, Trace

Floats = NDArray[np.float64]

WINDOW_LENGTHS = (1, 2, 3, 5, 9, 17)
"""Tokens that a verify pass sees at depths 0, 1, 2, 4, 8 and 16."""
DISTANCES = (0, 1, 2, 4, 8, 16)
REPEAT_TOKENS = 8


def shared_experts(first: IdArray, second: IdArray) -> NDArray[np.int64]:
    """Return how many ids rows of two arrays [..., K] have in common, [...]."""
    count = np.zeros(first.shape[:-1], np.int64)
    for rank in range(first.shape[-1]):
        count += (first[..., rank, None] == second).any(axis=-1)
    return count


def sequence_numbers(trace: Trace) -> NDArray[np.int64]:
    """Return the sequence that every position belongs to, [T]."""
    return np.repeat(np.arange(trace.num_sequences), np.diff(trace.sequence_offsets))


def starts_of(trace: Trace, length: int) -> NDArray[np.int64]:
    """Return every position from which `length` positions follow in the same sequence."""
    ends = np.repeat(trace.sequence_offsets[1:], np.diff(trace.sequence_offsets))
    positions = np.arange(trace.num_positions)
    return positions[positions + length <= ends]


def popularity(trace: Trace) -> Floats:
    """Return the share of positions that use each expert, [L, E]; a layer sums to K."""
    counts = np.zeros((trace.num_layers, trace.num_experts))
    for layer in range(trace.num_layers):
        ids = trace.target_ids[:, layer].reshape(-1)
        counts[layer] = np.bincount(ids, minlength=trace.num_experts)
    share: Floats = counts / max(trace.num_positions, 1)
    return share


def layer_entropy(trace: Trace) -> Floats:
    """Return the entropy of each layer's expert use in bits, [L]; at most log2(E)."""
    share = popularity(trace) / trace.top_k
    entropy: Floats = np.abs(np.sum(share * np.log2(np.where(share > 0, share, 1.0)), axis=1))
    return entropy


def uniform_overlap(trace: Trace) -> float:
    """Return the experts two positions would share under uniform routing: K * K / E."""
    return trace.top_k**2 / trace.num_experts


def adjacent_overlap(trace: Trace, lag: int = 1) -> Floats:
    """Return the mean experts shared by positions `lag` apart, [L]; NaN without such a pair."""
    starts = starts_of(trace, lag + 1)
    return _layer_mean(trace.target_ids, trace.target_ids, starts, starts + lag)


def union_growth(
    trace: Trace, lengths: Sequence[int] = WINDOW_LENGTHS, *, ids: IdArray | None = None
) -> Floats:
    """Return the mean experts a layer needs for windows of the given lengths, [lengths, L].

    `ids` may be another column of the trace, [T, L, K]. NaN where no sequence is that long.
    """
    routes = trace.target_ids if ids is None else ids
    starts = [starts_of(trace, length) for length in lengths]
    growth = np.full((len(lengths), routes.shape[1]), np.nan)
    for layer in range(routes.shape[1]):
        used = np.zeros((trace.num_positions + 1, trace.num_experts), np.int32)
        np.put_along_axis(used[1:], routes[:, layer].astype(np.int64), 1, axis=1)
        np.cumsum(used, axis=0, out=used)
        for row, (length, first) in enumerate(zip(lengths, starts, strict=True)):
            if first.size:
                growth[row, layer] = np.count_nonzero(used[first + length] != used[first]) / len(
                    first
                )
    return growth


@dataclass(frozen=True)
class Fidelity:
    """How well one set of routes foretells another, by layer.

    `exact`: share of positions whose two sets are equal; `recall`: share of the needed experts
    that were named.
    """

    exact: Floats
    recall: Floats


def fidelity(trace: Trace) -> Fidelity:
    """Return the draft's fidelity at equal positions. Raises UsageError on an unpaired trace."""
    return _fidelity(trace.target_ids, _draft_ids(trace))


def gate_fidelity(trace: Trace) -> Fidelity:
    """Return the fidelity of the gate applied one layer early, for layers 1 to L-1.

    Raises UsageError when the trace has no gate predictions.
    """
    if trace.gate_ids is None:
        raise UsageError(f"trace {trace.header.name!r} has no gate predictions")
    return _fidelity(trace.target_ids[:, 1:], trace.gate_ids)


def fidelity_by_distance(trace: Trace, distances: Sequence[int] = DISTANCES) -> Floats:
    """Return how much of a position's need the draft's routes named some tokens before.

    [distances, L] recall of the target's experts at t + distance by the draft's at t; distance
    0 is the draft's own position. Raises UsageError on an unpaired trace.
    """
    draft = _draft_ids(trace)
    rows = []
    for distance in distances:
        starts = starts_of(trace, distance + 1)
        rows.append(_layer_mean(draft, trace.target_ids, starts, starts + distance) / trace.top_k)
    return np.array(rows)


def recall_by_token(trace: Trace) -> Floats:
    """Return the draft's recall over all layers at every position, [T]."""
    shared = shared_experts(trace.target_ids, _draft_ids(trace))
    recall: Floats = shared.mean(axis=1) / trace.top_k
    return recall


@dataclass(frozen=True)
class Acceptance:
    """How often the target keeps a proposal, for both ways of choosing tokens.

    `greedy`: share of positions where both models' best tokens agree; `sampled`: mean
    probability that a sampled proposal is kept. `recall_accepted` and `recall_rejected` split
    the draft's route recall by greedy agreement (NaN when a side is empty).
    """

    greedy: float
    sampled: float
    recall_accepted: float
    recall_rejected: float


def agreement(trace: Trace) -> NDArray[np.bool_]:
    """Return where the draft's best token is the target's, [T].

    Raises UsageError when the tokens were not recorded.
    """
    if trace.draft_tokens is None or trace.target_tokens is None:
        raise UsageError(f"trace {trace.header.name!r} has no proposals: it is not paired")
    agree: NDArray[np.bool_] = trace.draft_tokens == trace.target_tokens
    return agree


def decode_positions(trace: Trace) -> NDArray[np.bool_]:
    """Return which positions produce a token of the continuation, [T].

    The last position of a prompt does; earlier ones do not.
    """
    within = np.arange(trace.num_positions) - trace.sequence_offsets[sequence_numbers(trace)]
    decode: NDArray[np.bool_] = within >= trace.prompt_lengths[sequence_numbers(trace)] - 1
    return decode


def acceptance(trace: Trace) -> Acceptance:
    """Return the acceptance over continuation positions.

    Raises UsageError on an unpaired trace.
    """
    agree, chosen = agreement(trace), decode_positions(trace)
    recall = recall_by_token(trace)
    probability = np.full(trace.num_positions, np.nan)
    if trace.accept_prob is not None:
        probability = trace.accept_prob.astype(np.float64)
    return Acceptance(
        greedy=_mean(agree[chosen]),
        sampled=_mean(probability[chosen]),
        recall_accepted=_mean(recall[chosen & agree]),
        recall_rejected=_mean(recall[chosen & ~agree]),
    )


def survival(trace: Trace, depths: Sequence[int] = (1, 2, 4, 8, 16)) -> Floats:
    """Return the share of windows whose first proposals all agree greedily, one per depth.

    Raises UsageError on an unpaired trace.
    """
    rejected = np.concatenate([[0], np.cumsum(~agreement(trace))])
    decode = decode_positions(trace)
    found = []
    for depth in depths:
        starts = starts_of(trace, depth)
        starts = starts[decode[starts]]
        found.append(_mean(rejected[starts + depth] == rejected[starts]))
    return np.array(found)


def repetition(trace: Trace) -> Floats:
    """Return the repeated share of each sequence, [S] (see `repeated_share`).

    Counted where the tokens are known, else what the header says, else NaN.
    """
    if trace.next_tokens is not None and (trace.next_tokens >= 0).any():
        return np.array([_repeated(part) for part in trace])
    if trace.header.repetition:
        stated = np.array(trace.header.repetition, np.float64)
        return np.where(stated < 0, np.nan, stated)
    return np.full(trace.num_sequences, np.nan)


def repeated_share(tokens: NDArray[Any], length: int = REPEAT_TOKENS) -> float:
    """Return the share of runs of `length` tokens that occurred before in `tokens` [N].

    0 for fewer tokens than one run. Prose stays near 0, a loop approaches 1.
    """
    if len(tokens) < length:
        return 0.0
    runs = np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), length)
    return 1.0 - len(np.unique(runs, axis=0)) / len(runs)


def _repeated(part: Trace) -> float:
    assert part.next_tokens is not None
    return repeated_share(part.next_tokens[part.next_tokens >= 0])


def _draft_ids(trace: Trace) -> IdArray:
    if trace.draft_ids is None:
        raise UsageError(
            f"trace {trace.header.name!r} is not paired: it has no draft; capture one or use "
            "with_assumed_draft"
        )
    return trace.draft_ids


def _fidelity(needed: IdArray, named: IdArray) -> Fidelity:
    shared = shared_experts(needed, named)
    top_k = needed.shape[-1]
    if not len(shared):
        empty = np.full(shared.shape[1], np.nan)
        return Fidelity(empty, empty)
    return Fidelity(exact=(shared == top_k).mean(axis=0), recall=shared.mean(axis=0) / top_k)


def _layer_mean(
    first: IdArray, second: IdArray, here: NDArray[np.int64], there: NDArray[np.int64]
) -> Floats:
    if not here.size:
        return np.full(first.shape[1], np.nan)
    mean: Floats = shared_experts(first[here], second[there]).mean(axis=0)
    return mean


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if values.size else float("nan")
