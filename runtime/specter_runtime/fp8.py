"""FP8 weights with block scales, dequantized to BF16 while they are read.

Done here rather than by transformers, which derives the block from the scale grid: a matrix whose
last block is cut short would silently get the scales of the wrong rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specter_runtime.weight_files import Source
from specter_traces.errors import UsageError, shown

CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Number types of FP8 weights."""

_DEFAULT_BLOCK = (128, 128)
_SCALE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e8m0fnu,
    torch.uint8,
)
_ACTIVATION_SCALES = (".activation_scale", ".input_scale", ".qscale_act")


@dataclass(frozen=True)
class Fp8Weight:
    """One matrix (or a stack of them) stored as FP8 codes and scales; it reads as BF16.

    `block`: rows and columns that share a scale, None when one scale serves a whole matrix.
    """

    codes: Source
    scales: Source
    block: tuple[int, int] | None

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return self.codes.name

    @property
    def dtype(self) -> torch.dtype:
        """BF16."""
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def read(self) -> Tensor:
        """The weight in BF16."""
        return dequantize(self.codes.read(), _as_numbers(self.scales.read()), self.block)


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """codes [..., R, C] times their scales, rounded once to BF16.

    scales: FP32, [..., ceil(R / rows), ceil(C / columns)] for a block of rows x columns, the last
    ones cut short; without a block one scale a matrix, of any shape with as many elements.
    """
    matrices = codes.view(-1, *(1, 1, *codes.shape)[-2:])
    rows, columns = block or (max(length, 1) for length in matrices.shape[1:])
    down, across = -(-matrices.shape[1] // rows), -(-matrices.shape[2] // columns)
    grid = scales.reshape(-1, down, across).expand(len(matrices), down, across)
    result = torch.empty(matrices.shape, dtype=torch.bfloat16)
    for index, matrix in enumerate(matrices):
        for line in range(down):  # one row of blocks at a time bounds the FP32 copy
            part = slice(line * rows, (line + 1) * rows)
            wide = grid[index, line].repeat_interleave(columns)[: matrix.shape[1]]
            result[index, part] = matrix[part].float() * wide
    return result.view(codes.shape)


def unpack(sources: Mapping[str, Source], quantization: Mapping[str, Any]) -> dict[str, Source]:
    """The checkpoint's tensors with FP8 weights as BF16 ones; their scales are used up.

    `quantization` is the config's `quantization_config`. UsageError when a weight has no scale or
    one that does not fit it, or is packed tighter than FP8.
    """
    block = _block(quantization)
    result: dict[str, Source] = {}
    used: set[str] = set()
    for name, source in sources.items():
        if source.dtype not in CODES:
            result[name] = source
            continue
        scales = _scales_of(name, sources)
        used.add(scales.name)
        result[name] = Fp8Weight(source, scales, _fitting_block(source, scales, block))
    if not used:
        raise UsageError(
            'config.json says quant_method "fp8", and no weight is stored in FP8: '
            "copy the checkpoint again"
        )
    return {
        name: source
        for name, source in result.items()
        if name not in used and not name.endswith(_ACTIVATION_SCALES)
    }


def refuse(sources: Mapping[str, Source]) -> None:
    """UsageError for FP8 weights in a checkpoint whose config does not say how they are scaled."""
    for name, source in sources.items():
        if source.dtype in CODES:
            raise UsageError(
                f"{name} is stored in FP8, but config.json has no quantization_config with "
                'quant_method "fp8" that says how it is scaled: copy the checkpoint again'
            )


def _block(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    if quantization.get("expert_dtype", "fp8") != "fp8":
        raise UsageError(
            f"the experts are stored as {shown(quantization['expert_dtype'])}: FP8 is the "
            "tightest format that is dequantized here"
        )
    block = quantization.get("weight_block_size", _DEFAULT_BLOCK)
    if block is None:
        return None
    good = isinstance(block, list | tuple) and len(block) == 2
    if not good or not all(type(size) is int and size > 0 for size in block):
        raise UsageError(f"weight_block_size must be two positive numbers, got {shown(block)}")
    return block[0], block[1]


def _scales_of(name: str, sources: Mapping[str, Source]) -> Source:
    """The scales that belong to a weight, by any of the names that checkpoints use."""
    stem = name.removesuffix(".weight")
    names = [f"{name}_scale_inv"]
    names += [f"{stem}.scale", f"{stem}.qscale_weight"] if stem != name else []
    found = next((sources[key] for key in names if key in sources), None)
    if found is None:
        raise UsageError(
            f"{name} is stored in FP8 and its scales, {names[0]}, are not there: "
            "copy the checkpoint again"
        )
    return found


def _fitting_block(
    codes: Source, scales: Source, block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The block that `scales` are for: `block`, or None for one scale a matrix."""
    stack, matrix = codes.shape[:-2], codes.shape[-2:]
    grid = tuple(-(-length // size) for length, size in zip(matrix, block or (), strict=False))
    if scales.dtype in _SCALE_DTYPES:
        if block is not None and len(matrix) == 2 and scales.shape == (*stack, *grid):
            return block
        if math.prod(scales.shape) in (1, math.prod(stack)):
            return None
    raise UsageError(
        f"{codes.name} has shape {list(codes.shape)} in blocks of {block or 'one matrix'}, which "
        f"does not fit its scales: {scales.dtype} {list(scales.shape)}; copy the checkpoint again"
    )


def _as_numbers(scales: Tensor) -> Tensor:
    """Scales as FP32. Bytes are exponents, as in E8M0."""
    return (
        scales.view(torch.float8_e8m0fnu).float() if scales.dtype == torch.uint8 else scales.float()
    )
