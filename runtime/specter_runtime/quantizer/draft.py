"""Which code a draft uses, by name, and the draft's weights of one expert tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specter_runtime.quantizer import base_code, symmetric
from specter_traces import DraftKind, UsageError

DEFAULT_GROUP_SIZE = 64
GROUP_SIZES = range(32, 129)
"""Group sizes that a draft may use: scales stay below half a bit a weight."""


@dataclass(frozen=True)
class DraftCode:
    """A draft's code: its name, bits a weight, weights a scale, kind (None: not quantized)."""

    name: str
    bits: int
    group_size: int
    kind: DraftKind | None

    def draft_weight(self, weight: Tensor, input_dim: int = -1) -> Tensor:
        """The draft's copy of `weight`, same shape and type; groups run along `input_dim`."""
        if self.kind is None:
            return weight.clone()
        rows = weight.detach().movedim(input_dim, -1)
        return self._coded(rows).movedim(-1, input_dim).contiguous()

    def _coded(self, rows: Tensor) -> Tensor:
        if self.kind is DraftKind.BASE:
            return base_code.encode(rows, self.bits, self.group_size).decode(rows.dtype)
        return symmetric.encode(rows, self.bits, self.group_size).decode(rows.dtype)


def parse(name: str, group_size: int = DEFAULT_GROUP_SIZE) -> DraftCode:
    """The code called `name`; UsageError for an unknown name or a group size out of range."""
    if name not in _CODES:
        raise UsageError(f"unknown draft {name!r}: choose one of {', '.join(_CODES)}")
    if group_size not in GROUP_SIZES:
        raise UsageError(
            f"group size must be {GROUP_SIZES[0]} to {GROUP_SIZES[-1]} weights, got {group_size}"
        )
    kind, bits = _CODES[name]
    return DraftCode(name, bits, group_size if kind else 0, kind)


_CODES: dict[str, tuple[DraftKind | None, int]] = {
    "base4": (DraftKind.BASE, 4),
    "base3": (DraftKind.BASE, 3),
    "base2": (DraftKind.BASE, 2),
    "int8": (DraftKind.SYMMETRIC, 8),
    "int4": (DraftKind.SYMMETRIC, 4),
    "int3": (DraftKind.SYMMETRIC, 3),
    "none": (None, 16),
}
