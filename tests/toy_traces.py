"""Small traces with known properties, for tests of everything that reads traces."""

from typing import Any

import numpy as np

from specter_traces import DraftInfo, Header, SequenceInfo, Trace


def toy_trace(
    layers: int = 3,
    experts: int = 16,
    top_k: int = 3,
    lengths: tuple[int, ...] = (40, 25),
    paired: bool = True,
    seed: int = 0,
    **header: Any,
) -> Trace:
    """Routes that drift slowly, and a draft that errs in one expert of ten."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    score = rng.standard_normal((tokens, layers, experts))
    for position in range(1, tokens):
        score[position] = 0.8 * score[position - 1] + 0.6 * score[position]
    ids = best(score, top_k)
    columns: dict[str, Any] = {}
    if paired:
        target = rng.integers(0, 50, tokens)
        columns = {
            "draft_ids": best(score + 0.1 * rng.standard_normal(score.shape), top_k),
            "draft_weights": falling_weights(ids.shape),
            "next_tokens": rng.integers(0, 50, tokens).astype(np.int32),
            "target_tokens": target.astype(np.int32),
            "draft_tokens": np.where(rng.random(tokens) < 0.9, target, target + 1).astype(np.int32),
            "accept_prob": rng.random(tokens).astype(np.float16),
        }
        if layers > 1:
            columns["gate_ids"] = best(score[:, 1:] + 0.3 * rng.standard_normal(1), top_k)
    return Trace(
        header=Header(
            **{
                "name": "toy",
                "model": "toy-moe",
                "num_layers": layers,
                "num_experts": experts,
                "top_k": top_k,
                "draft": DraftInfo("toy-draft", 4) if paired else None,
                "sequences": tuple(SequenceInfo(f"s{i}", "toys") for i in range(len(lengths))),
                **header,
            }
        ),
        sequence_offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lengths=np.array([min(5 + i, n) for i, n in enumerate(lengths)], np.int32),
        target_ids=ids,
        target_weights=falling_weights(ids.shape),
        **columns,
    )


def best(score: Any, top_k: int) -> Any:
    """The `top_k` highest scores of the last axis, highest first, as uint8 ids."""
    return np.argsort(-score, axis=-1)[..., :top_k].astype(np.uint8)


def falling_weights(shape: tuple[int, ...]) -> Any:
    """Weights that fall with rank and sum to 1."""
    row = 0.5 ** np.arange(shape[-1])
    return np.broadcast_to(row / row.sum(), shape).astype(np.float16)


def from_ids(ids: Any, experts: int = 32, lengths: tuple[int, ...] | None = None) -> Trace:
    """An unpaired trace of the given routes [T, L, K]."""
    array = np.asarray(ids, np.uint8)
    offsets = np.cumsum([0, *(lengths or (len(array),))], dtype=np.int64)
    return Trace(
        header=Header("toy", "toy-moe", array.shape[1], experts, array.shape[2]),
        sequence_offsets=offsets,
        prompt_lengths=np.zeros(len(offsets) - 1, np.int32),
        target_ids=array,
    )
