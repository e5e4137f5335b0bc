"""How an expert is coded, and what each type of weight needs for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from specter_cuda import WeightType
from specter_runtime.quantizer import DraftCode, parse
from specter_traces import SpecterError, UsageError

BaseName = Literal["base2", "base3", "base4"]


@dataclass(frozen=True)
class Format:
    """A type of exact weights as the codec sees it.

    A pattern is one bit of sign and `magnitude_bits`; magnitudes are ordered like their patterns,
    and those from `infinity` on are not finite. `integer`: a torch type of the same width.
    `low_bits`: mantissa bits, the width of a refinement's plane, so that a level is an octave.
    """

    dtype: torch.dtype
    integer: torch.dtype
    native: WeightType
    magnitude_bits: int
    low_bits: int
    infinity: int


FORMATS = (
    Format(torch.bfloat16, torch.int16, "bfloat16", 15, 7, 0x7F80),
    Format(torch.float16, torch.int16, "float16", 15, 10, 0x7C00),
    Format(torch.float8_e4m3fn, torch.uint8, "float8", 7, 3, 0x7F),
)
"""Every type of weights that can be coded; its place here is its number in a stream's header."""

LEVELS = 7
"""Octaves below the edge of the lowest bin that are told in unary; what lies beyond escapes.

More of them save less than half a percent and cost a plane of bits in every chunk.
"""


def format_of(tensor: Tensor) -> Format:
    """The format of a tensor's weights; SpecterError if they cannot be coded."""
    for each in FORMATS:
        if each.dtype is tensor.dtype:
            return each
    known = ", ".join(str(each.dtype).removeprefix("torch.") for each in FORMATS)
    raise SpecterError(f"coded weights are {known}, got {tensor.dtype}: load them as one of these")


@dataclass(frozen=True)
class Coding:
    """The coding of an expert: the code of its base, and how many weights share a scale.

    Raises UsageError for a base or a group size that no draft can have.
    """

    base: BaseName
    group_size: int

    def __post_init__(self) -> None:
        if self.base not in get_args(BaseName):
            raise UsageError(
                f"no base {self.base!r}: choose one of {', '.join(get_args(BaseName))}"
            )
        parse(self.base, self.group_size)

    @property
    def draft_code(self) -> DraftCode:
        """The code of the draft that the base is."""
        return parse(self.base, self.group_size)
