"""How an expert is coded, and what each type of weight needs for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from specter_cuda import EXPONENT_PLANE_BITS, WeightType
from specter_runtime.quantizer import DraftCode, parse
from specter_traces import SpecterError, UsageError

_BYTE_BITS = 8

BaseName = Literal["base2", "base3", "base4", "int8"]
_BASES: tuple[BaseName, ...] = get_args(BaseName)


@dataclass(frozen=True)
class Format:
    """A type of exact weights as the codec sees it.

    A pattern is one bit of sign and `magnitude_bits`; magnitudes are ordered like their patterns,
    and those from `infinity` on are not finite. `integer`: a torch type of the same width.
    """

    dtype: torch.dtype
    integer: torch.dtype
    native: WeightType
    magnitude_bits: int
    mantissa_bits: int
    infinity: int


FORMATS = (
    Format(torch.bfloat16, torch.int16, "bfloat16", 15, 7, 0x7F80),
    Format(torch.float16, torch.int16, "float16", 15, 10, 0x7C00),
    Format(torch.float8_e4m3fn, torch.uint8, "float8", 7, 3, 0x7F),
)
"""Every type of weights that can be coded; its place here is its number in a stream's header."""


def low_bits(form: Format, base_bits: int) -> int:
    """Width of a refinement's plane: what of it is not told in unary.

    After a base of bins it is the mantissa, so that a level is an octave. After 8 bits most ranges
    are a 16th of that. Without a base the plane holds mantissa, sign and the exponent's place.
    """
    if base_bits == 0:
        return EXPONENT_PLANE_BITS[form.native]
    return max(form.mantissa_bits - 3, 1) if base_bits == _BYTE_BITS else form.mantissa_bits


def most_levels(base_bits: int) -> int:
    """Levels told in unary; what lies beyond escapes.

    After a base of bins they are octaves below the lowest edge: more than 7 save less than half a
    percent and cost a plane of bits in every chunk. Without a base they are exponents.
    """
    return 15 if base_bits == _BYTE_BITS else 7


def format_of(tensor: Tensor) -> Format:
    """The format of a tensor's weights; SpecterError if they cannot be coded."""
    for each in FORMATS:
        if each.dtype is tensor.dtype:
            return each
    known = ", ".join(str(each.dtype).removeprefix("torch.") for each in FORMATS)
    raise SpecterError(f"coded weights are {known}, got {tensor.dtype}: load them as one of these")


@dataclass(frozen=True)
class Coding:
    """The coding of an expert: the code of its base, None for a coding without a draft.

    `group_size` weights share a scale, or without a base a choice of exponents. Raises UsageError
    for a base or a group size that no draft can have.
    """

    base: BaseName | None
    group_size: int

    def __post_init__(self) -> None:
        if self.base is not None and self.base not in _BASES:
            raise UsageError(f"no base {self.base!r}: choose one of {', '.join(_BASES)}, or None")
        parse(self.base or _BASES[0], self.group_size)

    @property
    def draft_code(self) -> DraftCode | None:
        """The code of the draft that the base is."""
        return parse(self.base, self.group_size) if self.base else None
