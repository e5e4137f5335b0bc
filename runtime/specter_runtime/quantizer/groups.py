"""Groups of weights along the input dimension, ragged tails included.

Every draft code works on groups of `group_size` neighbouring weights that share one scale. The last
group of a row may be shorter; it is padded with zeros, and the padding never counts in a statistic.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOAT16_MAX = 65504.0


def split(weight: Tensor, group_size: int) -> Tensor:
    """Cut the last dimension of `weight` [..., in] into groups: [..., groups, group_size], FP32.

    A ragged tail is padded with zeros; `counts` says how many weights of each group are real.
    Raises ValueError when `group_size` is not positive or `weight` has no input dimension.
    """
    if group_size < 1:
        raise ValueError(f"group size must be at least 1, got {group_size}")
    if weight.ndim == 0 or weight.shape[-1] == 0:
        raise ValueError(f"nothing to quantize in a weight of shape {tuple(weight.shape)}")
    width = weight.shape[-1]
    padding = -width % group_size
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, padding))
    return padded.reshape(*weight.shape[:-1], -1, group_size)


def join(groups: Tensor, width: int) -> Tensor:
    """Undo `split`: [..., groups, group_size] back to [..., width], without the padding."""
    return groups.flatten(-2)[..., :width]


def counts(width: int, group_size: int) -> Tensor:
    """Number of real weights in each group of a row of `width` weights: int64 [groups]."""
    starts = torch.arange(0, width, group_size)
    return torch.clamp(width - starts, max=group_size)


def root_mean_square(groups: Tensor, width: int) -> Tensor:
    """RMS of the real weights of every group, in FP16 without overflow: [..., groups]."""
    size = groups.shape[-1]
    number = counts(width, size).to(groups)
    mean_square = groups.double().square().sum(-1) / number
    return to_scale(mean_square.sqrt())


def to_scale(values: Tensor) -> Tensor:
    """Round positive values to the FP16 that a draft stores; too large becomes the maximum."""
    return values.clamp(max=_FLOAT16_MAX).to(torch.float16)
