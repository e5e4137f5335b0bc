"""What must hold in a trace; each rule yields the problems it finds, with got and expected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from specter_traces.columns import COLUMNS, PAIRED, expected_shape
from specter_traces.header import Header
from specter_traces.trace import IdArray, Trace, content_hash
from specter_traces.traps import signs


@dataclass(frozen=True)
class Problem:
    """One broken invariant: where, what, and the two values that disagree."""

    column: str
    what: str
    got: str
    expected: str

    def __str__(self) -> str:
        return f"{self.column}: {self.what}: got {self.got}, expected {self.expected}"


def validate(trace: Trace, *, thorough: bool = True) -> list[Problem]:
    """Return every invariant that `trace` breaks; an empty list means it is sound.

    Without `thorough` only what keeps a reader inside its arrays is checked: header, types,
    shapes, offsets, id ranges. Rules that need sound shapes run only when those hold.
    """
    problems = [*_header(trace.header), *_forms(trace)]
    if problems:
        return problems
    problems = [*_offsets(trace), *_ranges(trace)]
    if problems or not thorough:
        return problems
    problems = [*_repeated_ids(trace), *_values(trace), *_hash(trace)]
    return [*problems, *(Problem("target_ids", s.what, s.got, s.expected) for s in signs(trace))]


def _header(header: Header) -> Iterator[Problem]:
    for name in ("num_layers", "num_experts", "top_k"):
        if getattr(header, name) < 1:
            yield Problem("header", name, str(getattr(header, name)), "at least 1")
    if header.top_k > header.num_experts:
        yield Problem("header", "top_k", str(header.top_k), f"at most {header.num_experts} experts")
    if header.num_experts > 65536:
        yield Problem("header", "num_experts", str(header.num_experts), "at most 65536")


def _forms(trace: Trace) -> Iterator[Problem]:
    positions = trace.target_ids.shape[0] if trace.target_ids.ndim else 0
    sequences = max(trace.sequence_offsets.size - 1, 0)
    for column in COLUMNS:
        values = getattr(trace, column.name)
        if values is None:
            continue
        if values.dtype.name not in column.dtypes:
            yield Problem(column.name, "number type", values.dtype.name, " or ".join(column.dtypes))
        shape = expected_shape(column, trace.header, positions, sequences)
        if values.shape != shape:
            axes = ", ".join(column.axes)
            yield Problem(column.name, f"shape [{axes}]", str(list(values.shape)), str(list(shape)))
    if trace.is_paired:
        for name in PAIRED:
            if getattr(trace, name) is None:
                yield Problem(name, "column of a paired trace", "absent", "present")
    if trace.draft_weights is not None and trace.draft_ids is None:
        yield Problem("draft_ids", "column of a paired trace", "absent", "present")
    for name in ("sequences", "repetition"):
        count = len(getattr(trace.header, name))
        if count not in (0, sequences):
            yield Problem("header", f"entries of {name}", str(count), f"{sequences} or none")


def _offsets(trace: Trace) -> Iterator[Problem]:
    offsets = trace.sequence_offsets
    if offsets[0] != 0:
        yield Problem("sequence_offsets", "first offset", str(offsets[0]), "0")
    if offsets[-1] != trace.num_positions:
        yield Problem(
            "sequence_offsets", "last offset", str(offsets[-1]), f"{trace.num_positions} positions"
        )
    lengths = np.diff(offsets)
    if (lengths < 1).any():
        index = int(np.argmax(lengths < 1))
        yield Problem(
            "sequence_offsets", f"length of sequence {index}", str(lengths[index]), "at least 1"
        )
        return
    wrong = (trace.prompt_lengths < 0) | (trace.prompt_lengths > lengths)
    if wrong.any():
        index = int(np.argmax(wrong))
        yield Problem(
            "prompt_lengths",
            f"prompt of sequence {index}",
            str(trace.prompt_lengths[index]),
            f"0 to {lengths[index]}",
        )


def _ranges(trace: Trace) -> Iterator[Problem]:
    for name in ("target_ids", "draft_ids", "gate_ids"):
        ids: IdArray | None = getattr(trace, name)
        if ids is None or not ids.size or int(ids.max()) < trace.num_experts:
            continue
        where = np.argwhere(ids >= trace.num_experts)[0]
        yield Problem(
            name, f"id at {where.tolist()}", str(ids[tuple(where)]), f"below {trace.num_experts}"
        )
    for column in COLUMNS:
        values = getattr(trace, column.name)
        if column.holds_tokens and values is not None and values.size and values.min() < -1:
            yield Problem(column.name, "token", str(values.min()), "-1 or more")


def _repeated_ids(trace: Trace) -> Iterator[Problem]:
    for name in ("target_ids", "draft_ids", "gate_ids"):
        ids: IdArray | None = getattr(trace, name)
        if ids is None:
            continue
        repeated = _rows_with_repeats(ids)
        if repeated.any():
            where = np.argwhere(repeated)[0]
            yield Problem(
                name,
                f"ids at {where.tolist()} ({int(repeated.sum())} such rows)",
                str(ids[tuple(where)].tolist()),
                f"{trace.top_k} distinct experts",
            )


def _rows_with_repeats(ids: IdArray) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    ordered = np.sort(ids, axis=-1)
    found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = (
        ordered[..., 1:] == ordered[..., :-1]
    ).any(axis=-1)
    return found


def _values(trace: Trace) -> Iterator[Problem]:
    for name in ("target_weights", "draft_weights", "accept_prob"):
        values = getattr(trace, name)
        if values is not None and not np.isfinite(values).all():
            yield Problem(name, "values", "NaN or infinite", "finite")
    accept = trace.accept_prob
    if accept is not None and accept.size and (accept.min() < 0 or accept.max() > 1.01):
        yield Problem(
            "accept_prob", "probability", f"{accept.min():.3f} to {accept.max():.3f}", "0 to 1"
        )


def _hash(trace: Trace) -> Iterator[Problem]:
    stored = trace.header.content_hash
    if stored and stored != (found := content_hash(trace)):
        yield Problem("header", "content hash", found[:16], f"{stored[:16]} as recorded")
