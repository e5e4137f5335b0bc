"""What every importer makes of a log, and the checks before it becomes a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.columns import narrow_ids
from specter_traces.errors import SpecterError
from specter_traces.header import Header, SequenceInfo
from specter_traces.trace import Trace
from specter_traces.validation import validate

MOST_EXPERTS = 65536


@dataclass(frozen=True)
class Origin:
    """What a log does not say about itself. `num_experts` 0: one more than the largest id."""

    name: str
    model: str = "unknown"
    num_experts: int = 0
    source: str = ""
    licence: str = ""
    created_by: str = ""


@dataclass(frozen=True)
class Recorded:
    """One sequence of a log before it joins a trace."""

    info: SequenceInfo
    ids: NDArray[Any]  # [T, L, K], any integer type
    weights: NDArray[np.float16] | None = None
    repetition: float = -1.0
    prompt_length: int = 0


def refusal(source: Path, reason: str) -> SpecterError:
    """Return the error that refuses a log."""
    return SpecterError(f"{source} cannot be imported: {reason}")


def join(source: Path, origin: Origin, parts: Iterable[Recorded]) -> Trace:
    """Return the sequences of a log as one sealed trace, or raise what is wrong with them."""
    recorded = list(parts)
    if not recorded:
        raise refusal(source, "it holds no routes")
    shapes = {part.ids.shape[1:] for part in recorded}
    if len(shapes) != 1:
        raise refusal(source, f"sequences differ in [layer, k]: {sorted(shapes)}")
    ids = np.concatenate([_integers(source, part) for part in recorded])
    weights = [part.weights for part in recorded if part.weights is not None]
    num_experts = origin.num_experts or int(ids.max()) + 1
    if num_experts > MOST_EXPERTS:
        raise refusal(source, f"it would have {num_experts} experts, at most {MOST_EXPERTS}")
    _refuse_range(source, ids, num_experts)
    lengths = [len(part.ids) for part in recorded]
    header = _header(origin, recorded, num_experts)
    if not header.is_writable:
        raise refusal(source, "a name in it is not valid text: it holds half a character")
    trace = Trace(
        header=header,
        sequence_offsets=np.cumsum([0, *lengths], dtype=np.int64),
        prompt_lengths=np.array([part.prompt_length for part in recorded], np.int32),
        target_ids=narrow_ids(ids, num_experts),
        target_weights=np.concatenate(weights) if len(weights) == len(recorded) else None,
    ).sealed()
    problems = validate(trace)
    if problems:
        raise refusal(source, str(problems[0]))
    return trace


def _header(origin: Origin, recorded: Sequence[Recorded], num_experts: int) -> Header:
    layers, top_k = recorded[0].ids.shape[1:]
    known = any(part.repetition >= 0 for part in recorded)
    guessed = () if origin.num_experts else ("number of experts taken from the largest id",)
    return Header(
        name=origin.name,
        model=origin.model,
        num_layers=layers,
        num_experts=num_experts,
        top_k=top_k,
        source=origin.source,
        licence=origin.licence,
        created_by=origin.created_by,
        sequences=tuple(part.info for part in recorded),
        repetition=tuple(part.repetition for part in recorded) if known else (),
        notes=guessed,
    )


def _integers(source: Path, part: Recorded) -> NDArray[np.int64]:
    ids = part.ids
    if ids.ndim != 3 or 0 in ids.shape:
        raise refusal(
            source,
            f"sequence {part.info.name}: expected [token, layer, k], got shape {list(ids.shape)}",
        )
    if ids.dtype.kind not in "iu":
        raise refusal(
            source, f"sequence {part.info.name}: expert ids are {ids.dtype}, not integers"
        )
    return ids.astype(np.int64)


def _refuse_range(source: Path, ids: NDArray[np.int64], num_experts: int) -> None:
    wrong = (ids < 0) | (ids >= num_experts)
    if wrong.any():
        row = np.argwhere(wrong)[0]
        raise refusal(
            source,
            f"row {row[0]}, layer {row[1]}: id {ids[tuple(row)]} is outside 0 to "
            f"{num_experts - 1}; negative ids are padding of rows with fewer than k experts",
        )
