"""Running a synthetic router: scores in chunks of positions, their best experts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from specter_traces.synthesize.copied import CopiedRows, Plan
from specter_traces.synthesize.fit import Anchor
from specter_traces.synthesize.scores import MEMORIES, Singles, best_experts

_CHUNK = 256


def emit(
    anchors: list[Anchor],
    num_layers: int,
    top_k: int,
    plan: Plan,
    rows: CopiedRows,
    generator: np.random.Generator,
) -> dict[str, NDArray[np.int64] | None]:
    """Return the id columns: scores in chunks, their best experts, renamed at random."""
    anchor_of = [anchors[layer * len(anchors) // num_layers] for layer in range(num_layers)]
    constants = np.stack([anchor.constants for anchor in anchor_of]).astype(np.float32)
    parts: dict[str, list[NDArray[np.int64]]] = {"target_ids": [], "draft_ids": [], "gate_ids": []}
    done = 0
    for score in _scores(anchor_of, constants.shape[1], plan.lengths, generator):
        parts["target_ids"].append(best_experts(constants + score, top_k))
        if rows.agree is not None:
            seen = _seen_by_draft(score, anchor_of, rows.agree[done : done + len(score)], generator)
            parts["draft_ids"].append(best_experts(constants + seen, top_k))
        if anchors[0].gate is not None:
            gate = np.array([anchor.gate for anchor in anchor_of], np.float32)
            seen = _blurred(score, gate[None, :], generator)
            parts["gate_ids"].append(best_experts(constants + seen, top_k)[:, 1:])
        done += len(score)
    names = np.argsort(generator.random(constants.shape), axis=1)
    renamed: dict[str, NDArray[np.int64] | None] = {}
    for name, chunks in parts.items():
        renamed[name] = _rename(names, np.concatenate(chunks)) if chunks else None
    return renamed


def _rename(names: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    layers = np.arange(len(names) - ids.shape[1], len(names))
    renamed: NDArray[np.int64] = names[layers[:, None], ids]
    return renamed


def _scores(
    anchors: list[Anchor],
    num_experts: int,
    lengths: tuple[int, ...],
    generator: np.random.Generator,
) -> Iterator[Singles]:
    """Yield scores without their constants, unit variance, [positions, L, E] in chunks."""
    shares = np.sqrt(np.stack([anchor.memories for anchor in anchors], axis=1)).astype(np.float32)
    used = [index for index in range(len(MEMORIES)) if shares[index].max() > 0.01]
    shape = (len(anchors), num_experts)
    for length in lengths:
        states = {index: generator.standard_normal(shape, np.float32) for index in used}
        for start in range(0, length, _CHUNK):
            count = min(_CHUNK, length - start)
            score = np.zeros((count, *shape), np.float32)
            for index in used:
                states[index] = _remember(
                    score, states[index], shares[index], float(MEMORIES[index]), generator
                )
            yield score


def _remember(
    score: Singles, state: Singles, share: Singles, memory: float, generator: np.random.Generator
) -> Singles:
    """Add one component to `score` [positions, L, E] in place; return its state after."""
    weight = share[:, None]
    if memory == 1.0:
        score += weight * state
        return state
    fresh = generator.standard_normal(score.shape, np.float32)
    fresh *= np.float32(np.sqrt(1.0 - memory * memory))
    if memory > 0.0:
        for row in fresh:
            row += np.float32(memory) * state
            state = row
    score += weight * fresh
    return state.copy()


def _seen_by_draft(
    score: Singles,
    anchors: list[Anchor],
    agree: NDArray[np.bool_],
    generator: np.random.Generator,
) -> Singles:
    both = np.array([anchor.draft for anchor in anchors], np.float32)  # [L, kept or rejected]
    return _blurred(score, np.where(agree[:, None], both[:, 0], both[:, 1]), generator)


def _blurred(
    score: Singles, correlation: NDArray[np.float32], generator: np.random.Generator
) -> Singles:
    """Return scores of the same law that correlate so with `score`, [positions, L] each."""
    noise = generator.standard_normal(score.shape, np.float32)
    noise *= np.sqrt(1.0 - correlation * correlation)[..., None]
    noise += correlation[..., None] * score
    return noise
