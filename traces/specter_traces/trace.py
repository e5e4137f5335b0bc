"""A router trace in memory: a header and its columns, whole or one sequence at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.columns import COLUMNS
from specter_traces.errors import UsageError
from specter_traces.header import Header

IdArray = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class Trace:
    """Which experts a model's routers chose, position by position.

    Columns are those of `specter_traces.columns` (shapes on the format page), None when absent,
    and read-only when they are mapped from a file. Two columns always exist besides the ids:
    `sequence_offsets` [S+1] and `prompt_lengths` [S].
    """

    header: Header
    sequence_offsets: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]
    target_ids: IdArray
    target_weights: NDArray[np.float16] | None = None
    draft_ids: IdArray | None = None
    draft_weights: NDArray[np.float16] | None = None
    next_tokens: NDArray[np.int32] | None = None
    target_tokens: NDArray[np.int32] | None = None
    draft_tokens: NDArray[np.int32] | None = None
    accept_prob: NDArray[np.float16] | None = None
    gate_ids: IdArray | None = None

    @property
    def num_layers(self) -> int:
        """MoE layers, L."""
        return self.header.num_layers

    @property
    def num_experts(self) -> int:
        """Routed experts of one layer, E."""
        return self.header.num_experts

    @property
    def top_k(self) -> int:
        """Experts a router picks for one token, K."""
        return self.header.top_k

    @property
    def num_positions(self) -> int:
        """Recorded positions of all sequences, T."""
        return len(self.target_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences, S."""
        return len(self.sequence_offsets) - 1

    @property
    def is_paired(self) -> bool:
        """Whether a draft was recorded (or assumed) beside the target."""
        return self.draft_ids is not None

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns that are present, by name, in the order of the format."""
        present = ((column.name, getattr(self, column.name)) for column in COLUMNS)
        return {name: values for name, values in present if values is not None}

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first position of a sequence and the one after its last.

        Raises UsageError when there is no such sequence.
        """
        if not 0 <= index < self.num_sequences:
            raise UsageError(
                f"sequence {index} of trace {self.header.name!r} does not exist: "
                f"it has {self.num_sequences}, counted from 0"
            )
        return int(self.sequence_offsets[index]), int(self.sequence_offsets[index + 1])

    def sequence(self, index: int) -> Trace:
        """Return one sequence as a trace that shares this trace's memory (no content hash)."""
        start, stop = self.bounds(index)
        parts = {
            column.name: getattr(self, column.name)[start:stop]
            for column in COLUMNS
            if column.per_position and getattr(self, column.name) is not None
        }
        return Trace(
            header=_header_of(self.header, [index]),
            sequence_offsets=np.array([0, stop - start], np.int64),
            prompt_lengths=self.prompt_lengths[index : index + 1],
            **parts,
        )

    def __iter__(self) -> Iterator[Trace]:
        """Yield every sequence as `sequence` does."""
        return (self.sequence(index) for index in range(self.num_sequences))

    def select(self, indices: Iterable[int]) -> Trace:
        """Return a trace of the given sequences in the given order, copied, with its own hash.

        Raises UsageError when a sequence does not exist or none is asked for.
        """
        chosen = list(indices)
        if not chosen:
            raise UsageError(f"no sequence of trace {self.header.name!r} was selected")
        parts = [self.sequence(index) for index in chosen]
        return concatenate(_header_of(self.header, chosen), parts)

    def with_header(self, **changes: Any) -> Trace:
        """Return the same columns under a header with some fields replaced."""
        return replace(self, header=replace(self.header, **changes))

    def sealed(self) -> Trace:
        """Return the same trace with the hash of its columns in the header."""
        return self.with_header(content_hash=content_hash(self))


def concatenate(header: Header, parts: Sequence[Trace]) -> Trace:
    """Join traces of one model, in order, under `header`; the result is sealed.

    Columns that not every part has are left out.
    """
    lengths = [np.diff(part.sequence_offsets) for part in parts]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    names = [c.name for c in COLUMNS if c.name != "sequence_offsets"]
    shared = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in names
        if all(getattr(part, name) is not None for part in parts)
    }
    return Trace(header=header, sequence_offsets=offsets.astype(np.int64), **shared).sealed()


def content_hash(trace: Trace) -> str:
    """Return the SHA-256 (hex) over every column's name, type, shape and bytes."""
    digest = hashlib.sha256()
    for name, values in trace.columns().items():
        little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
        digest.update(f"{name} {little.dtype.name} {little.shape}\n".encode())
        digest.update(little.data)
    return digest.hexdigest()


def _header_of(header: Header, indices: Sequence[int]) -> Header:
    return replace(
        header,
        content_hash="",
        sequences=tuple(header.sequences[i] for i in indices) if header.sequences else (),
        repetition=tuple(header.repetition[i] for i in indices) if header.repetition else (),
    )
