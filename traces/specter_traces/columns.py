"""The columns of a trace: their names, number types and axes, each stated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.header import Header


@dataclass(frozen=True)
class Column:
    """One column. `axes` names its dimensions with the letters of the format page.

    S sequences, "S+1", T positions, L layers, "L-1", K experts per token.
    """

    name: str
    dtypes: tuple[str, ...]
    axes: tuple[str, ...]
    required: bool = False

    @property
    def per_position(self) -> bool:
        """Whether the first axis is positions, so that a sequence is a slice of it."""
        return self.axes[0] == "T"

    @property
    def holds_ids(self) -> bool:
        """Whether the values are expert ids."""
        return self.name.endswith("_ids")

    @property
    def holds_tokens(self) -> bool:
        """Whether the values are vocabulary ids (-1: unknown)."""
        return self.name.endswith("_tokens")


_IDS = ("uint8", "uint16")
_TLK = ("T", "L", "K")

COLUMNS: tuple[Column, ...] = (
    Column("sequence_offsets", ("int64",), ("S+1",), required=True),
    Column("prompt_lengths", ("int32",), ("S",), required=True),
    Column("target_ids", _IDS, _TLK, required=True),
    Column("target_weights", ("float16",), _TLK),
    Column("draft_ids", _IDS, _TLK),
    Column("draft_weights", ("float16",), _TLK),
    Column("next_tokens", ("int32",), ("T",)),
    Column("target_tokens", ("int32",), ("T",)),
    Column("draft_tokens", ("int32",), ("T",)),
    Column("accept_prob", ("float16",), ("T",)),
    Column("gate_ids", _IDS, ("T", "L-1", "K")),
)
COLUMN_BY_NAME = {column.name: column for column in COLUMNS}

PAIRED = ("draft_ids", "next_tokens", "target_tokens", "draft_tokens", "accept_prob")
"""Columns that a paired trace has together (its draft's weights may be missing)."""


def expected_shape(
    column: Column, header: Header, positions: int, sequences: int
) -> tuple[int, ...]:
    """Return the shape `column` must have in a trace of this size."""
    sizes = {
        "S": sequences,
        "S+1": sequences + 1,
        "T": positions,
        "L": header.num_layers,
        "L-1": header.num_layers - 1,
        "K": header.top_k,
    }
    return tuple(sizes[axis] for axis in column.axes)


def narrow_ids(ids: NDArray[Any], num_experts: int) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Return ids in the smallest type that names `num_experts` experts."""
    return ids.astype(np.uint8) if num_experts <= 256 else ids.astype(np.uint16)
