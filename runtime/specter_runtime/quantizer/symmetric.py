"""Symmetric integer code: round to nearest on a grid around zero, one searched scale a group.

The usual draft quantization (INT8, INT4, INT3), and the baseline for the base code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specter_runtime.quantizer import groups as grouping

_CLIP_STEPS = 33
_SMALLEST_CLIP = 0.35
_MOST_BITS = 8


@dataclass(frozen=True)
class SymmetricCoded:
    """A weight tensor in integers: codes int8 [..., in], scales FP16 [..., groups]."""

    bits: int
    group_size: int
    codes: Tensor
    scales: Tensor

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weights that the draft computes with, [..., in]."""
        per_group = grouping.split(self.codes, self.group_size)
        scaled = per_group * self.scales.to(torch.float32).unsqueeze(-1)
        return grouping.join(scaled, self.codes.shape[-1]).to(dtype)


def encode(weight: Tensor, bits: int, group_size: int) -> SymmetricCoded:
    """Encode `weight` [..., in] with `bits` (2 to 8) bits, levels -q..q with q = 2^(bits-1) - 1.

    The scale of each group is the one of a list of clipping ratios of its largest magnitude that
    has the least squared error. Raises ValueError for other bits or a non-finite weight.
    """
    if not 2 <= bits <= _MOST_BITS:
        raise ValueError(f"the symmetric code has 2 to {_MOST_BITS} bits, got {bits}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the symmetric code needs finite weights, got NaN or infinity")
    groups = grouping.split(weight, group_size)
    top = 2 ** (bits - 1) - 1
    scales = _search_scales(groups, top)
    codes = _round(groups, scales, top).to(torch.int8)
    return SymmetricCoded(bits, group_size, grouping.join(codes, weight.shape[-1]), scales)


def _search_scales(groups: Tensor, top: int) -> Tensor:
    """The FP16 scale of least squared error for every group: [..., groups]."""
    largest = groups.abs().amax(-1)
    best = grouping.to_scale(largest / top)
    least = _squared_error(groups, best, top)
    for ratio in torch.linspace(_SMALLEST_CLIP, 1.0, _CLIP_STEPS)[:-1].tolist():
        scales = grouping.to_scale(largest * (ratio / top))
        error = _squared_error(groups, scales, top)
        better = error < least
        best = torch.where(better, scales, best)
        least = torch.where(better, error, least)
    return best


def _squared_error(groups: Tensor, scales: Tensor, top: int) -> Tensor:
    decoded = _round(groups, scales, top) * scales.to(torch.float32).unsqueeze(-1)
    return (decoded - groups).square().sum(-1)


def _round(groups: Tensor, scales: Tensor, top: int) -> Tensor:
    """Nearest level of every weight; a group whose scale is zero is all zeros."""
    scale = scales.to(torch.float32).unsqueeze(-1)
    levels = torch.where(scale > 0, groups / scale.clamp(min=1e-30), 0.0)
    return levels.round().clamp(-top, top)
