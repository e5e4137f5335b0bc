"""A block: the memory of one compiled run as a table of 8-byte cells.

A cell holds an integer, a float, or the address of a flat numpy array. Compiled code gets the
block's address and sees an object whose attributes are the fields, so the rule functions, which
only index and compute, need no change. No reference counting and no copying: one pointer is all
that travels from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_sim.policies.state import State


class Cell(Enum):
    """What a cell holds."""

    INT = "i8"
    FLOAT = "f8"
    INTS = "i8*"
    FLOATS = "f8*"
    BYTES = "i1*"
    SHORTS = "i2*"
    WORDS = "i4*"


_DTYPES = {
    Cell.INTS: np.int64,
    Cell.FLOATS: np.float64,
    Cell.BYTES: np.int8,
    Cell.SHORTS: np.int16,
    Cell.WORDS: np.int32,
}

# Fields of ``policies.state.State``, then those of the driver, in the order of their cells.
STATE_INTS = ("layers", "experts", "groups", "top_k", "known", "ahead")
STATE_FLOAT_ARRAYS = ("knobs", "uses")
# The state of a large model fills a processor's caches, so small numbers take little room: flags
# and counts up to a draft's depth (at most 64) a byte, indices four.
STATE_BYTES = ("residency", "holds", "fresh", "hot", "predicted", "planned")
STATE_WORDS = ("slot_of", "occupant", "demand_queue", "plan_queue", "members", "touched")
DRIVER_FIELDS: dict[str, Cell] = {
    "eviction_rule": Cell.INT,
    "prefetch_rule": Cell.INT,
    "depth_rule": Cell.INT,
    "joins": Cell.INT,
    "grouped": Cell.INT,
    "demand_all": Cell.INT,
    "use_gate": Cell.INT,
    "queue_depth": Cell.INT,
    "prefetch_fields": Cell.INT,
    "note_room": Cell.INT,
    "latency_s": Cell.FLOAT,
    "copy_s": Cell.FLOAT,
    "pieces_s": Cell.FLOAT,
    "route_s": Cell.FLOAT,
    "use_s": Cell.FLOAT,
    "expert_s": Cell.FLOAT,
    "group_launch_s": Cell.FLOAT,
    "clock": Cell.FLOATS,
    "link": Cell.INTS,
    "queue_expert": Cell.INTS,
    "queue_slot": Cell.INTS,
    "queue_kind": Cell.INTS,
    "queue_victim": Cell.INTS,
    "queue_submitted": Cell.FLOATS,
    "draft_roof": Cell.FLOATS,
    "layer_roof": Cell.FLOATS,
    "dense_roof": Cell.FLOATS,
    "end_roof": Cell.FLOATS,
    "target": Cell.SHORTS,
    "draft": Cell.WORDS,
    "gate": Cell.SHORTS,
    "accepted": Cell.INTS,
    "union": Cell.INTS,
    "waiting": Cell.INTS,
    "ready": Cell.INTS,
    "pending": Cell.INTS,
    "mark": Cell.INTS,
    "gate_hints": Cell.INTS,
    "prefetch_memory": Cell.FLOATS,
    "prefetch_priors": Cell.FLOATS,
    "depth_memory": Cell.FLOATS,
    "requests": Cell.INTS,
    "request_times": Cell.FLOATS,
    "resident": Cell.INTS,
    "bound_ids": Cell.INTS,
    "bound_ends": Cell.INTS,
    "bound_kept": Cell.INTS,
    "bound_next": Cell.INTS,
    "bound_until": Cell.INTS,
    "bound_members": Cell.INTS,
    "stall_s": Cell.FLOATS,
    "window_count": Cell.INTS,
    "window_position": Cell.INTS,
    "window_began_s": Cell.FLOATS,
    "window_ended_s": Cell.FLOATS,
    "window_depth": Cell.INTS,
    "window_accepted": Cell.INTS,
    "note_count": Cell.INTS,
    "note_ints": Cell.INTS,
    "note_seconds": Cell.FLOATS,
}


def _state_cell(name: str) -> Cell:
    if name in STATE_INTS:
        return Cell.INT
    if name in STATE_BYTES:
        return Cell.BYTES
    if name in STATE_WORDS:
        return Cell.WORDS
    return Cell.FLOATS if name in STATE_FLOAT_ARRAYS else Cell.INTS


FIELDS: dict[str, Cell] = {name: _state_cell(name) for name in State._fields} | DRIVER_FIELDS
PLACES: dict[str, int] = {name: place for place, name in enumerate(FIELDS)}


class Block:
    """Arrays and scalars of one run, and the cells that point to them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self._cells = np.zeros(len(FIELDS), dtype=np.int64)
        self.put_all(values)

    @property
    def address(self) -> int:
        """Where the cells are. Valid as long as this object lives."""
        return int(self._cells.ctypes.data)

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Set several fields."""
        for name, value in values.items():
            self.put(name, value)

    def put(self, name: str, value: Any) -> None:
        """Set a field; an array is kept alive (and converted to the field's type)."""
        place, kind = PLACES[name], FIELDS[name]
        if kind is Cell.INT:
            self._cells[place] = int(value)
        elif kind is Cell.FLOAT:
            self._cells.view(np.float64)[place] = float(value)
        else:
            array = np.ascontiguousarray(value, dtype=_DTYPES[kind]).reshape(-1)
            self.arrays[name] = array
            self._cells[place] = array.ctypes.data
