"""Codes of 2, 3, 4 or 8 bits in bytes: the layout that native decoding reads.

The codes of a group fill its bytes from the lowest bit up, so a byte holds two codes of 4 bits, the
first in the low half. Every group starts on a byte; the last group of a row may be shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_WORD_CODES = 8
"""Codes that are packed together: they take exactly `bits` bytes, whatever their size."""


def row_bytes(width: int, group_size: int, bits: int) -> int:
    """Bytes of the codes of one row of `width` weights."""
    full, rest = divmod(width, group_size)
    return full * _group_bytes(group_size, bits) + _group_bytes(rest, bits)


def pack(codes: Tensor, bits: int, group_size: int) -> Tensor:
    """Pack uint8 codes [rows, width], each below 2^bits: uint8 [rows, row_bytes]."""
    rows, width = codes.shape
    groups = pad(codes, (0, -width % group_size)).view(rows, -1, group_size)
    words = pad(groups, (0, -group_size % _WORD_CODES)).view(*groups.shape[:2], -1, _WORD_CODES)
    filled = (words.to(torch.int64) << _shifts(bits)).sum(-1)
    in_bytes = filled.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    kept = in_bytes[..., : _group_bytes(group_size, bits)].flatten(-2)
    return kept[:, : row_bytes(width, group_size, bits)].contiguous()


def unpack(packed: Tensor, bits: int, group_size: int, width: int) -> Tensor:
    """Undo `pack`: uint8 codes [rows, width]."""
    rows, stored = packed.shape
    size = _group_bytes(group_size, bits)
    groups = pad(packed, (0, -stored % size)).view(rows, -1, size)
    words = pad(groups, (0, -size % bits)).view(*groups.shape[:2], -1, bits)
    filled = pad(words, (0, _WORD_CODES - bits)).contiguous().view(torch.int64)
    codes: Tensor = (filled >> _shifts(bits)) & (2**bits - 1)
    return codes.flatten(-2)[..., :group_size].flatten(-2)[:, :width].to(torch.uint8)


def _group_bytes(count: int, bits: int) -> int:
    return (count * bits + 7) // 8


def _shifts(bits: int) -> Tensor:
    return torch.arange(_WORD_CODES) * bits
