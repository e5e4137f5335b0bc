"""The base code: sign and magnitude bin of every weight, the draft layer of a coded expert.

A group of weights shares `s`, its root mean square in FP16. A code of `b` bits is the weight's sign
and one of 2^(b-1) magnitude bins. There is no zero level: a code always fixes the sign and nearly
all of the exponent, which is what lets a refinement restore the exact weight. Bin edges are whole
64ths of `s`, near the Lloyd-Max edges of a Gaussian. A weight is in bin `j` when
`t_j * s <= |w| < t_(j+1) * s`, compared exactly: BF16 and FP16 magnitudes times 64 and products of
an edge with `s` (at most 8 + 11 bits) are exact in FP32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specter_runtime.quantizer import groups as grouping

EDGE_UNIT = 64
"""Bin edges are counted in 1/64 of the group's scale."""

EDGES: dict[int, tuple[int, ...]] = {
    2: (63,),
    3: (32, 67, 112),
    4: (17, 33, 51, 70, 92, 118, 154),
}
"""Inner bin edges in 1/64 of the scale, by number of bits."""


@dataclass(frozen=True)
class BaseCoded:
    """A weight tensor in base code.

    codes: uint8 [..., in], `sign << (bits - 1) | bin`; scales: FP16 [..., groups];
    representatives: FP32 [2^(bits-1)], the magnitude of each bin in units of the scale.
    """

    bits: int
    group_size: int
    codes: Tensor
    scales: Tensor
    representatives: Tensor

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weights that the draft computes with: one representative a bin, [..., in]."""
        places = self.codes.long()
        magnitudes = self.representatives[places & (2 ** (self.bits - 1) - 1)]
        signs = 1.0 - 2.0 * (places >> (self.bits - 1)).to(torch.float32)
        per_group = grouping.split(magnitudes * signs, self.group_size)
        scaled = per_group * self.scales.to(torch.float32).unsqueeze(-1)
        return grouping.join(scaled, self.codes.shape[-1]).to(dtype)


def encode(weight: Tensor, bits: int, group_size: int) -> BaseCoded:
    """Encode `weight` [..., in] with 2, 3 or 4 bits.

    A bin is represented by the mean of a Gaussian in it. Centroids fitted to each tensor make a
    smaller error and a worse draft: they shrink the experts' outputs. Raises ValueError for other
    bits or a non-finite weight.
    """
    edges = edges_for(bits)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the base code needs finite weights, got NaN or infinity")
    width = weight.shape[-1]
    groups = grouping.split(weight, group_size)
    scales = grouping.root_mean_square(groups, width)
    bins = magnitude_bins(groups, scales, edges)
    codes = bins | (torch.signbit(groups).to(torch.uint8) << (bits - 1))
    return BaseCoded(bits, group_size, grouping.join(codes, width), scales, gaussian_means(edges))


def edges_for(bits: int) -> tuple[int, ...]:
    """Inner bin edges of a code of `bits` bits, in 1/64 of the scale; ValueError if undefined."""
    if bits not in EDGES:
        raise ValueError(f"the base code has 2, 3 or 4 bits, got {bits}")
    return EDGES[bits]


def magnitude_bins(groups: Tensor, scales: Tensor, edges: tuple[int, ...]) -> Tensor:
    """Bin of every weight: the number of edges at or below its magnitude, uint8 like `groups`."""
    magnitudes = groups.abs() * EDGE_UNIT
    scale = scales.to(torch.float32).unsqueeze(-1)
    bins = torch.zeros(groups.shape, dtype=torch.uint8)
    for edge in edges:
        bins += magnitudes >= edge * scale
    return bins


def gaussian_means(edges: tuple[int, ...]) -> Tensor:
    """Mean magnitude of a unit Gaussian inside each bin: FP32 [bins], in units of the scale."""
    bounds = [0.0, *(edge / EDGE_UNIT for edge in edges), math.inf]
    means = [
        (_density(low) - _density(high)) / (_cumulative(high) - _cumulative(low))
        for low, high in pairwise(bounds)
    ]
    return torch.tensor(means, dtype=torch.float32)


def _density(value: float) -> float:
    return math.exp(-value * value / 2) / math.sqrt(2 * math.pi)


def _cumulative(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2
