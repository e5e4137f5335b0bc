"""Which tensors of a checkpoint hold routed experts, whatever layout its architecture stores."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from specter_runtime.experts import ExpertLayer
from specter_runtime.weight_files import Source, StoredTensor

_EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.(?P<expert>\d{1,6})\.(?P<matrix>.+)", re.ASCII)
_FUSED = re.compile(r"(?P<layer>.*\bexperts)\.(?P<matrix>.+)", re.ASCII)
_NUMBER = re.compile(r"\.(\d{1,6})\.", re.ASCII)


@dataclass(frozen=True)
class ExpertTensor:
    """A stored tensor: one expert's matrix, or with `expert` None those of a whole layer.

    layer: index of the MoE layer; matrix: the tensor's name inside the experts.
    """

    source: Source
    layer: int
    expert: int | None
    matrix: str

    def experts(self) -> Iterable[int]:
        """The experts that the tensor holds, in order."""
        return range(self.source.shape[0]) if self.expert is None else (self.expert,)

    def read(self, expert: int) -> Tensor:
        """One expert's matrix as it is stored, and no more of the file than that where possible."""
        if self.expert is not None:
            return self.source.read()
        if not isinstance(self.source, StoredTensor):
            return self.source.read()[expert]
        return self.source.row(expert).read()


def expert_tensors(
    sources: Mapping[str, Source], layers: Iterable[ExpertLayer]
) -> list[ExpertTensor]:
    """The tensors that hold the weights of `layers`, in the order of layers.

    Those of layers that the model does not have, biases and scales are not among them.
    """
    index = {_number(layer.name): layer.index for layer in layers}
    found = []
    for name, source in sources.items():
        one, fused = _EXPERT.fullmatch(name), _FUSED.fullmatch(name)
        match = one or fused
        if match is None or not source.dtype.is_floating_point:
            continue
        layer = index.get(_number(match["layer"]))
        if layer is not None and len(source.shape) == (2 if one else 3):
            expert = int(one["expert"]) if one else None
            found.append(ExpertTensor(source, layer, expert, match["matrix"]))
    return sorted(found, key=lambda each: each.layer)


def _number(module: str) -> int | None:
    """The layer's number in the name of its experts."""
    match = _NUMBER.search(f".{module}.")
    return int(match[1]) if match else None
