"""Torch's own CPU product with 4-bit integers, for symmetric codes that it accepts.

It multiplies codes without decoding them first. Measured 2026-12-01 with
benchmarks/draft_kernels.py (BF16, one thread of a busy AVX-512 EPYC, torch 2.13, groups of 64), as
a share of the time of decoding and F.linear: 0.23 and 0.30 for [128, 256] with 1 and 4 tokens, 0.34
and 0.39 for [256, 64], 0.17 and 0.37 for [2816, 2048]. Most of what a small product saves is the
start of F.linear in BF16, which takes 0.76 to 0.79 of that time with the weight decoded beforehand.

The kernel has its own layout, beside the packed codes, and takes its scales in the type of the
inputs: with BF16 its products are not those of the decoded weight to the last bit. Torch's 8-bit
kernel has one scale a row and cannot multiply groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GROUP_SIZES = (32, 64, 128)
_ROWS = 16
"""The kernel takes whole blocks of rows."""
_ZERO = 8
"""The kernel's code for zero."""


@dataclass(frozen=True)
class Int4Kernel:
    """A weight [rows, width] as the kernel keeps it: stored codes, and a scale and zero a group."""

    stored: Tensor
    scales_and_zeros: Tensor
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the kernel's own copy."""
        return self.stored.nbytes + self.scales_and_zeros.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """The type of inputs and outputs."""
        return self.scales_and_zeros.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [..., width]: [..., rows]."""
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.reshape(-1, x.shape[-1]), self.stored, self.group_size, self.scales_and_zeros
        )
        return product.view(*x.shape[:-1], -1)


def accepts(rows: int, width: int, group_size: int) -> bool:
    """Whether the kernel multiplies a weight of this shape and group size."""
    return rows % _ROWS == 0 and width % group_size == 0 and group_size in _GROUP_SIZES


def build(levels: Tensor, scales: Tensor, group_size: int, dtype: torch.dtype) -> Int4Kernel:
    """The kernel for int8 levels [rows, width] in -8..7 and scales [rows, groups]."""
    tiles = 1  # unused on CPUs
    stored = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
        levels.to(torch.int32) + _ZERO, tiles
    )
    both = torch.stack([scales, torch.zeros_like(scales)], dim=-1)
    return Int4Kernel(stored, both.transpose(0, 1).contiguous().to(dtype), group_size)
