"""Signs that a log is not what it claims, met in other people's traces.

Each finder yields a reason (got, expected) or nothing. A finder stays silent when chance alone
could explain what it sees, so that toy traces pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specter_traces.statistics import adjacent_overlap, shared_experts, starts_of
from specter_traces.trace import IdArray, Trace

_CERTAIN_BITS = 40.0
"""Information that must coincide before a coincidence is called a fault."""
_ROWS_EXAMINED = 2000
_STRIDES = 64
_COPIED_SHARE = 0.5
_FEWEST_PAIRS = 200


@dataclass(frozen=True)
class Sign:
    """What was found in the target's routes, and what a sound trace shows instead."""

    what: str
    got: str
    expected: str


def signs(trace: Trace) -> Iterator[Sign]:
    """Yield every sign of a broken log; needs a trace whose shapes and ids are sound."""
    yield from constant_start(trace)
    yield from copied_layers(trace)
    yield from interleaved_rows(trace)
    yield from misaligned_rows(trace)


def constant_start(trace: Trace) -> Iterator[Sign]:
    """A sequence whose first rows are equal in every layer: an engine's warm-up."""
    if _row_bits(trace) * trace.num_layers < _CERTAIN_BITS:
        return
    for index in range(trace.num_sequences):
        start, stop = trace.bounds(index)
        head = trace.target_ids[start : min(stop, start + _ROWS_EXAMINED)]
        same = (head[1:] == head[0]).all(axis=(1, 2))
        run = 1 + (int(np.argmin(same)) if not same.all() else len(same))
        if run > 1:
            yield Sign(
                f"constant rows at the start of sequence {index}",
                f"{run} equal rows",
                "routes that change; drop the engine's warm-up rows",
            )
            return


def copied_layers(trace: Trace) -> Iterator[Sign]:
    """Layers whose rows are another layer's: a hook that read one buffer for both."""
    rows = _sample(trace.target_ids)
    if len(rows) * _row_bits(trace) * _COPIED_SHARE < _CERTAIN_BITS:
        return
    for layer in range(1, trace.num_layers):
        equal = (rows[:, :layer] == rows[:, layer, None]).all(axis=2).mean(axis=0)
        original = int(np.argmax(equal))
        if equal[original] > _COPIED_SHARE:
            yield Sign(
                f"layer {layer} is a copy of layer {original}",
                f"{equal[original]:.0%} equal rows",
                "routes of its own in every layer",
            )


def interleaved_rows(trace: Trace) -> Iterator[Sign]:
    """Rows of several sequences in turn: neighbours share fewer experts than rows apart do.

    A loop in the text also repeats at a distance, but its neighbours still share more than
    unrelated rows; rows of different sequences do not.
    """
    sample = trace if trace.num_positions <= 4 * _ROWS_EXAMINED else trace.sequence(0)
    near = adjacent_overlap(sample).mean()
    unrelated = _unrelated_overlap(sample)
    if math.isnan(near) or near > 1.05 * unrelated:
        return
    for stride in range(2, _STRIDES + 1):
        starts = starts_of(sample, stride + 1)
        if len(starts) < _FEWEST_PAIRS:
            return
        ids = sample.target_ids
        apart = shared_experts(ids[starts], ids[starts + stride]).mean(axis=1)
        noise = float(apart.std()) / math.sqrt(len(starts))
        if apart.mean() > 1.1 * near + 6 * noise:
            yield Sign(
                f"rows look interleaved by batch (stride {stride})",
                f"neighbours share {near:.2f} experts, rows {stride} apart {apart.mean():.2f}",
                "neighbours to share most; split the batch into sequences",
            )
            return


def misaligned_rows(trace: Trace) -> Iterator[Sign]:
    """Rows shifted against their tokens: equal tokens do not share experts in the first layer."""
    pairs = _equal_token_pairs(trace)
    if len(pairs) < _FEWEST_PAIRS or trace.header.synthetic:
        return
    first = trace.target_ids[:, 0]
    equal = float(shared_experts(first[pairs[:, 0]], first[pairs[:, 1]]).mean())
    other = np.random.default_rng(0).permutation(pairs[:, 1])
    random = float(shared_experts(first[pairs[:, 0]], first[other]).mean())
    if equal < random + 0.2 * (trace.top_k - random):
        yield Sign(
            "rows look shifted against their tokens",
            f"equal tokens share {equal:.2f} experts in layer 0, random pairs {random:.2f}",
            "equal tokens to share far more",
        )


def _equal_token_pairs(trace: Trace) -> NDArray[np.int64]:
    """Return pairs of neighbouring occurrences of the same input token, [N, 2]."""
    if trace.next_tokens is None:
        return np.zeros((0, 2), np.int64)
    # The input of a position is the token that followed the position before it.
    positions = starts_of(trace, 2) + 1
    positions = positions[: 4 * _ROWS_EXAMINED]
    tokens = trace.next_tokens[positions - 1]
    positions, tokens = positions[tokens >= 0], tokens[tokens >= 0]
    order = np.argsort(tokens, kind="stable")
    same = tokens[order][1:] == tokens[order][:-1]
    return np.stack([positions[order][:-1][same], positions[order][1:][same]], axis=1)


def _unrelated_overlap(trace: Trace) -> float:
    generator = np.random.default_rng(0)
    pairs = generator.integers(0, trace.num_positions, (2, _ROWS_EXAMINED))
    return float(shared_experts(trace.target_ids[pairs[0]], trace.target_ids[pairs[1]]).mean())


def _row_bits(trace: Trace) -> float:
    """Bits in one layer's ordered row if every ordering were as likely."""
    orders = math.perm(trace.num_experts, trace.top_k)
    sets = math.comb(trace.num_experts, trace.top_k)
    return math.log2(orders) if sets > 1 else 0.0


def _sample(ids: IdArray) -> IdArray:
    return ids[:: max(1, len(ids) // _ROWS_EXAMINED)]
