"""Where a checkpoint's own tensors lie in the matrices that a model computes with.

transformers merges, stacks and transposes them while loading, each architecture in its way. Here it
is not asked how: every stored matrix is looked for among the rows of its expert, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specter_runtime.coded_header import Origin
from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.stored_experts import ExpertTensor
from specter_traces.errors import SpecterError


class _Place(NamedTuple):
    matrix: str
    first: int
    transposed: bool


def find_origins(
    tensors: list[ExpertTensor], layers: tuple[ExpertLayer, ...]
) -> tuple[Origin, ...]:
    """The place of every tensor, each bit of which was compared with the loaded model's.

    SpecterError naming the first that lies nowhere as a whole.
    """
    hints: dict[tuple[str, torch.Size], _Place] = {}
    return tuple(_origin(tensor, layers[tensor.layer], hints) for tensor in tensors)


def _origin(
    tensor: ExpertTensor, layer: ExpertLayer, hints: dict[tuple[str, torch.Size], _Place]
) -> Origin:
    found: set[_Place] = set()
    for expert in tensor.experts():
        rows = {
            name: layer.as_rows(weight.detach()[expert])
            for name, weight in expert_weights(layer.experts).items()
        }
        weight = tensor.read(expert).to(next(iter(rows.values())).dtype)
        key = (tensor.matrix, weight.shape)
        place = next(
            (p for p in _places(rows, weight, hints.get(key)) if _at(rows, weight, p)), None
        )
        if place is None:
            break
        hints[key] = place
        found.add(place)
    if place is None or len(found) != 1:
        raise SpecterError(
            f"{tensor.source.name} does not lie in one piece in what the model computes with: "
            "this layout could not be restored, so it is not encoded"
        )
    rows_count = weight.shape[1] if place.transposed else weight.shape[0]
    name = tensor.source.name
    return Origin(
        name, tensor.layer, tensor.expert, place.matrix, place.first, rows_count, place.transposed
    )


def _places(rows: Mapping[str, Tensor], weight: Tensor, hint: _Place | None) -> Iterator[_Place]:
    """Where `weight` could lie, the likeliest place first."""
    if hint is not None:
        yield hint
    for name, matrix in rows.items():
        for transposed in (False, True):
            count, width = weight.T.shape if transposed else weight.shape
            if width == matrix.shape[1]:
                for first in range(0, len(matrix) - count + 1, count):
                    yield _Place(name, first, transposed)


def _at(rows: Mapping[str, Tensor], weight: Tensor, place: _Place) -> bool:
    """Whether `weight` lies there, to the bit."""
    weight = weight.T if place.transposed else weight
    found = rows[place.matrix][place.first : place.first + len(weight)]
    integers = torch.int16 if weight.dtype.itemsize == 2 else torch.uint8
    return torch.equal(found.view(integers), weight.contiguous().view(integers))
