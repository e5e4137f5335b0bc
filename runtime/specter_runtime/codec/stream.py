"""The header of a refinement: what it says of itself, and the form that holds plain weights."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from specter_traces import SpecterError

MAGIC = b"SXR1"
HEADER_BYTES = 32
_HEADER = struct.Struct("<4s6BH3IQ")


class Kind(IntEnum):
    """What follows the header."""

    PLAIN = 0
    LEVELS = 1


@dataclass(frozen=True)
class Header:
    """What a refinement says of itself; `size_bytes` counts the header too.

    base_bits is 0 without a base; weight_type is a place in `coding.FORMATS`.
    """

    kind: Kind
    base_bits: int
    weight_type: int
    low_bits: int
    levels: int
    group_size: int
    rows: int
    width: int
    size_bytes: int

    def pack(self) -> bytes:
        """The header as the 32 bytes that begin a refinement."""
        coding = (self.base_bits, self.weight_type, self.low_bits, self.levels)
        shape = (self.group_size, self.rows, self.width)
        return _HEADER.pack(MAGIC, self.kind, *coding, 0, *shape, 0, self.size_bytes)


def read_header(refinement: Tensor) -> Header:
    """The header of a refinement (uint8, maybe longer); SpecterError if it is none or cut short."""
    if refinement.dtype is not torch.uint8 or refinement.ndim != 1:
        raise SpecterError(f"a refinement is a row of bytes, got {_described(refinement)}")
    start = bytes(refinement[:HEADER_BYTES].tolist())
    if len(start) < HEADER_BYTES or start[:4] != MAGIC:
        raise SpecterError(f"not a refinement: it begins with {start[:4]!r}, expected {MAGIC!r}")
    _, kind, bits, weight_type, low_bits, levels, _, *shape, _, size_bytes = _HEADER.unpack(start)
    if kind not in tuple(Kind) or size_bytes < HEADER_BYTES:
        raise SpecterError(f"damaged refinement: kind {kind}, {size_bytes} bytes; load it again")
    if size_bytes > len(refinement):
        raise SpecterError(
            f"refinement cut short: it has {size_bytes} bytes, got {len(refinement)}; load it again"
        )
    group_size, rows, width = shape
    coding = (bits, weight_type, low_bits, levels)
    return Header(Kind(kind), *coding, group_size, rows, width, size_bytes)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
