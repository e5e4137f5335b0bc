"""What stands where an experts module kept its weights, once they live in store and slots.

An architecture's experts loop asks its weight parameter for one expert at a time, by index. A table
answers from wherever the active pass computes: slots for the target, decoded codes for the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from specter_runtime.experts import ExpertLayer

Source = Callable[[int], Tensor]
"""The weight of one expert (its id in the layer) as the active pass sees it."""


class WeightTable:
    """One weight of one layer, indexed by expert id."""

    __slots__ = ("source",)

    def __init__(self) -> None:
        self.source: Source = _nobody

    def __getitem__(self, expert: Any) -> Tensor:
        """expert: an int or a 0-dimensional integer tensor."""
        return self.source(int(expert))


Tables = tuple[dict[str, WeightTable], ...]
"""The tables of every layer, by the name of the weight."""


def stand_in(layers: tuple[ExpertLayer, ...], names: Sequence[Sequence[str]]) -> Tables:
    """Put tables where the weights called `names[layer]` were; the parameters are gone already."""
    tables = tuple({name: WeightTable() for name in of_layer} for of_layer in names)
    for layer, of_layer in zip(layers, tables, strict=True):
        layer.experts.__dict__.update(of_layer)
    return tables


@contextmanager
def answering(tables: Tables, sources: Sequence[dict[str, Source]]) -> Iterator[None]:
    """Inside, every table answers from the source of its layer and name."""
    before = [[table.source for table in of_layer.values()] for of_layer in tables]
    for of_layer, new in zip(tables, sources, strict=True):
        for name, table in of_layer.items():
            table.source = new[name]
    try:
        yield
    finally:
        for of_layer, old in zip(tables, before, strict=True):
            for table, source in zip(of_layer.values(), old, strict=True):
                table.source = source


def _nobody(expert: int) -> Tensor:
    raise RuntimeError(f"expert {expert} was asked for outside a draft or target pass")
