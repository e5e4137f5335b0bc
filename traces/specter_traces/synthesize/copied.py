"""What a synthetic trace takes from its source row by row: sequences, agreement, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces import statistics as stats
from specter_traces.trace import Trace

_BLOCK = 32
"""Positions copied together, so that runs of accepted proposals keep their length."""


@dataclass(frozen=True)
class Plan:
    """Lengths and prompt lengths of the sequences, and the source's sequence each is cut from."""

    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    sources: tuple[int, ...]


def plan_sequences(trace: Trace, tokens: int) -> Plan:
    """Return sequences of `tokens` positions in all, as long as the source's, the last cut."""
    lengths, prompts, sources = [], [], []
    left, index = tokens, 0
    while left:
        start, stop = trace.bounds(index % trace.num_sequences)
        length = min(left, stop - start)
        lengths.append(length)
        prompts.append(min(int(trace.prompt_lengths[index % trace.num_sequences]), length))
        sources.append(index % trace.num_sequences)
        left, index = left - length, index + 1
    return Plan(tuple(lengths), tuple(prompts), tuple(sources))


@dataclass(frozen=True)
class CopiedRows:
    """Columns taken from the source position by position, and where proposals agree [T]."""

    columns: dict[str, NDArray[Any]]
    agree: NDArray[np.bool_] | None


def copied_rows(
    trace: Trace, lengths: tuple[int, ...], generator: np.random.Generator
) -> CopiedRows:
    """Return tokens and acceptance of random blocks of a paired source, else nothing."""
    if not trace.is_paired:
        return CopiedRows({}, None)
    tokens = sum(lengths)
    starts = generator.integers(0, trace.num_positions, -(-tokens // _BLOCK))
    rows = (starts[:, None] + np.arange(_BLOCK)).reshape(-1)[:tokens] % trace.num_positions
    columns: dict[str, NDArray[Any]] = {"next_tokens": np.full(tokens, -1, np.int32)}
    for name in ("target_tokens", "draft_tokens", "accept_prob"):
        values = getattr(trace, name)
        if values is not None:
            columns[name] = values[rows]
    return CopiedRows(columns, stats.agreement(trace)[rows])


def weight_rows(
    trace: Trace, name: str, layers: int, top_k: int, tokens: int, generator: np.random.Generator
) -> NDArray[np.float16]:
    """Return weight rows drawn from the source's, stretched over other ranks, sums kept."""
    source = getattr(trace, name)
    layer = np.arange(layers) * trace.num_layers // layers
    rows = source[generator.integers(0, len(source), (tokens, layers)), layer].astype(np.float32)
    if top_k == trace.top_k:
        return np.asarray(rows, np.float16)
    place = (np.arange(top_k) + 0.5) * trace.top_k / top_k - 0.5
    low = np.clip(np.floor(place).astype(int), 0, trace.top_k - 1)
    high, part = np.minimum(low + 1, trace.top_k - 1), np.clip(place - low, 0.0, 1.0)
    spread = rows[..., low] * (1 - part) + rows[..., high] * part
    spread *= rows.sum(axis=-1, keepdims=True) / np.maximum(spread.sum(-1, keepdims=True), 1e-9)
    return np.asarray(spread, np.float16)
