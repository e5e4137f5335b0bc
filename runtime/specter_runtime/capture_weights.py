"""Computing as the target and as the draft of a capture, which reads each text once with both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.loaded_model import LoadedModel
from specter_runtime.quantizer import DraftCode
from specter_runtime.weight_table import Source, answering


class Weights(Protocol):
    """Two ways for a model to compute; everything but routed experts' weights is the same."""

    layers: tuple[ExpertLayer, ...]

    def target(self) -> AbstractContextManager[None]:
        """The model computes as the target inside."""

    def draft(self) -> AbstractContextManager[None]:
        """The model computes as the draft inside."""


class SwappedWeights:
    """A model that keeps its experts; the draft's weights are swapped in where they were."""

    def __init__(self, layers: tuple[ExpertLayer, ...], code: DraftCode) -> None:
        """Quantize all routed experts of `layers`, one expert at a time."""
        self.layers = layers
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        for layer in layers:
            for weight in expert_weights(layer.experts).values():
                draft = [code.draft_weight(expert, layer.input_dim) for expert in weight.detach()]
                self._weights.append((weight, torch.stack(draft)))

    def target(self) -> AbstractContextManager[None]:
        """The model as it is."""
        return nullcontext()

    @contextmanager
    def draft(self) -> Iterator[None]:
        """The model computes as the draft inside, as the target again afterwards."""
        targets = [weight.data for weight, _ in self._weights]
        try:
            for weight, draft in self._weights:
                weight.data = draft
            yield
        finally:
            for (weight, _), target in zip(self._weights, targets, strict=True):
                weight.data = target


class StoredWeights:
    """A model whose experts have moved out: the target reads the store, off any link."""

    def __init__(self, loaded: LoadedModel, code: DraftCode) -> None:
        """The draft is the loaded model's in `code`."""
        self.layers = loaded.network.layers
        self._loaded = loaded
        self._draft = loaded.draft(code).sources()

    def target(self) -> AbstractContextManager[None]:
        """Experts come from host memory."""
        return answering(self._loaded.network.tables, self._stored())

    def draft(self) -> AbstractContextManager[None]:
        """Experts are decoded from their codes."""
        return answering(self._loaded.network.tables, self._draft)

    def _stored(self) -> list[dict[str, Source]]:
        store = self._loaded.store
        return [
            {part.name: _Stored(self._loaded, layer, part.name) for part in store.parts[layer]}
            for layer in range(store.layers)
        ]


class _Stored:
    """One weight of one layer, read from the store."""

    def __init__(self, loaded: LoadedModel, layer: int, name: str) -> None:
        self._loaded, self._layer, self._name = loaded, layer, name

    def __call__(self, expert: int) -> Tensor:
        return self._loaded.store.weights(self._layer, expert)[self._name]
