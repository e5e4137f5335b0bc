"""Coded experts: take exact weights apart into a base and a refinement, and put them together."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal

from specter_cuda.library import LIBRARY

WeightType = Literal["bfloat16", "float16", "float8"]
"""Types of exact weights; float8 is E4M3 without infinities."""

_WEIGHT_TYPES: dict[str, int] = {"bfloat16": 0, "float16": 1, "float8": 2}
_MOST_WEIGHTS = 2**28
_MOST_GROUP_SIZE = 2**16 - 1
_MOST_LEVELS = 15
_MOST_LOW_BITS = {"bfloat16": 15, "float16": 15, "float8": 7}
EXPONENT_PLANE_BITS: dict[WeightType, int] = {"bfloat16": 10, "float16": 13, "float8": 6}
"""Low bits of a weight without a base: 2 for the exponent's place, mantissa and sign."""

_EDGES = {0: 0, 2: 1, 3: 3, 4: 7, 8: 0}
"""Bits of a base, and how many inner edges its bins have."""

_Edges = ctypes.c_float * 7
_MATRIX = (
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_void_p,
)
_expand = LIBRARY.specter_expand
_expand.restype = ctypes.c_int
_expand.argtypes = (
    *_MATRIX,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_int,
)
_compress = LIBRARY.specter_compress
_compress.restype = ctypes.c_uint64
_compress.argtypes = (
    *_MATRIX,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
    ctypes.c_int,
)


class ExpandOutcome(IntEnum):
    """How an expansion ended."""

    FINE = 0
    TRUNCATED = 1
    FOREIGN = 2
    CORRUPT = 3


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix of exact weights and how its base is coded.

    `base_bits`: 2, 3 or 4 for sign and magnitude bin; 8 for the levels of a grid; 0 for no base,
    where groups share a choice of exponents. `edges`: the inner edges of the magnitude bins in
    units of a group's scale, 2^(bits-1) - 1 of them; none with 8 or 0 bits. Raises ValueError for
    what the native code does not take.
    """

    rows: int
    width: int
    weight_type: WeightType
    base_bits: int
    group_size: int
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.weight_type not in _WEIGHT_TYPES:
            raise ValueError(f"no weight type {self.weight_type!r}: {', '.join(_WEIGHT_TYPES)}")
        if self.base_bits not in _EDGES:
            raise ValueError(f"a base has {list(_EDGES)} bits, got {self.base_bits}")
        if len(self.edges) != _EDGES[self.base_bits]:
            raise ValueError(f"{self.base_bits} bits need other edges than {self.edges}")
        if min(self.rows, self.width) < 1 or self.rows * self.width > _MOST_WEIGHTS:
            raise ValueError(
                f"a matrix has 1 to {_MOST_WEIGHTS} weights, got {self.rows, self.width}"
            )
        if not 1 <= self.group_size <= _MOST_GROUP_SIZE:
            raise ValueError(f"a group has 1 to {_MOST_GROUP_SIZE} weights, got {self.group_size}")


def expand_expert(
    matrix: CodedMatrix,
    codes: int,
    scales: int,
    refinement: int,
    refinement_bytes: int,
    out: int,
    *,
    portable: bool = False,
) -> ExpandOutcome:
    """Write the exact weights to the address `out`: FINE, or what is wrong with the refinement.

    `codes` and `scales` are as `decode_codes` takes them, 0 without a base. Never reads behind
    `refinement_bytes` or the base, whatever the bytes are; when the outcome is not FINE, what `out`
    holds is undefined. `portable` avoids the processor's vector instructions. Raises ValueError for
    a null address.
    """
    _refuse_null(refinement, out, *_base(matrix, codes, scales))
    outcome = _expand(*_native(matrix), codes, scales, refinement, refinement_bytes, out, portable)
    return ExpandOutcome(outcome)


def compress_expert(
    matrix: CodedMatrix,
    weights: int,
    low_bits: int,
    levels: int,
    codes: int,
    scales: int,
    refinement: int,
    capacity_bytes: int,
    *,
    portable: bool = False,
) -> int:
    """Write the base of `weights` to `codes` and `scales` and the rest to `refinement`.

    All are addresses. A base of 8 bits must be there already and is only read: every finite weight
    lies within half a step of its level, as a division rounded to FP32 finds it. Returns the bytes
    of the refinement, or 0 when `capacity_bytes` are too few; the encoder wants some 256 bytes more
    than it returns. `low_bits` of a weight go to the plane of fixed width (EXPONENT_PLANE_BITS
    without a base), at most `levels` (1 to 15) bits tell its level. Raises ValueError for a null
    address or numbers out of range.
    """
    _refuse_null(weights, refinement, *_base(matrix, codes, scales))
    if not 1 <= low_bits <= _MOST_LOW_BITS[matrix.weight_type]:
        raise ValueError(f"{matrix.weight_type} has no {low_bits} low bits")
    if matrix.base_bits == 0 and low_bits != EXPONENT_PLANE_BITS[matrix.weight_type]:
        raise ValueError(f"without a base {matrix.weight_type} has other low bits than {low_bits}")
    if not 1 <= levels <= _MOST_LEVELS:
        raise ValueError(f"levels are 1 to {_MOST_LEVELS}, got {levels}")
    written: int = _compress(
        *_native(matrix),
        weights,
        low_bits,
        levels,
        codes,
        scales,
        refinement,
        capacity_bytes,
        portable,
    )
    return written


def _native(matrix: CodedMatrix) -> tuple[object, ...]:
    kind = _WEIGHT_TYPES[matrix.weight_type]
    edges = _edge_array(matrix.edges)
    return kind, matrix.rows, matrix.width, matrix.base_bits, matrix.group_size, edges


@lru_cache(maxsize=16)
def _edge_array(edges: Sequence[float]) -> ctypes.Array[ctypes.c_float]:
    return _Edges(*edges)


def _base(matrix: CodedMatrix, codes: int, scales: int) -> tuple[int, ...]:
    return (codes, scales) if matrix.base_bits else ()


def _refuse_null(*addresses: int) -> None:
    if min(addresses) <= 0:
        raise ValueError(f"null address among {', '.join(map(hex, addresses))}")
