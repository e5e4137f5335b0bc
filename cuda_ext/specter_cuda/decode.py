"""Decode the packed codes of a draft's weights, at the speed of memory and without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from specter_cuda.library import LIBRARY

OutType = Literal["float32", "bfloat16", "float16"]

_OUT_TYPES: dict[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
_TABLE_SIZE = 16
_TABLE_BITS = (2, 3, 4)
_BYTE_BITS = 8

_Table = ctypes.c_float * _TABLE_SIZE

_decode = LIBRARY.specter_decode_codes
_decode.restype = None
_decode.argtypes = (
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
)


def decode_codes(
    codes: int,
    scales: int,
    table: Sequence[float],
    bits: int,
    rows: int,
    width: int,
    group_size: int,
    out: int,
    out_type: OutType,
    *,
    portable: bool = False,
) -> None:
    """Write `rows` x `width` weights of type `out_type` to the address `out`.

    `codes`, `scales` and `out` are addresses. Each row is cut into groups of `group_size` weights
    (the last one may be shorter); `scales` holds one FP16 for each, rows after one another. Codes
    of `bits` bits fill a group's bytes from the lowest bit up, and every group starts on a byte. A
    weight is `table[code] * scale` in FP32, rounded once to nearest, ties to even; the table has
    2^bits entries. With 8 bits a code is a signed byte that is multiplied itself, and the table
    must be empty. Scales and table must be finite.

    `portable` avoids the processor's vector instructions. Raises ValueError for other bits or
    types, a table of another length, a null address or an empty shape.
    """
    if out_type not in _OUT_TYPES:
        raise ValueError(f"out_type is one of {', '.join(_OUT_TYPES)}, got {out_type!r}")
    if min(rows, width, group_size) < 1:
        raise ValueError(f"nothing to decode in {rows} rows of {width}, groups of {group_size}")
    if not (codes > 0 and scales > 0 and out > 0):
        raise ValueError(f"null address: codes {codes:#x}, scales {scales:#x}, out {out:#x}")
    entries = _entries(tuple(table), bits)
    kind = _OUT_TYPES[out_type]
    _decode(codes, scales, entries, bits, rows, width, group_size, out, kind, portable)


@lru_cache(maxsize=64)
def _entries(table: tuple[float, ...], bits: int) -> ctypes.Array[ctypes.c_float] | None:
    expected = {_BYTE_BITS: 0} | {few: 2**few for few in _TABLE_BITS}
    if bits not in expected:
        raise ValueError(f"codes have 2, 3, 4 or 8 bits, got {bits}")
    if len(table) != expected[bits]:
        raise ValueError(f"{bits} bits need a table of {expected[bits]}, got {len(table)} entries")
    return _Table(*table) if table else None
