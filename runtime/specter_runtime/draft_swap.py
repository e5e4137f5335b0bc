"""Computing as the draft by swapping weights: the draft of a capture, which reads a text once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.quantizer import DraftCode


class DraftExperts:
    """Draft weights of every routed expert; everything else, biases too, stays the target's."""

    def __init__(self, layers: tuple[ExpertLayer, ...], code: DraftCode) -> None:
        """Quantize all routed experts of `layers`, one expert at a time."""
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        for layer in layers:
            for weight in expert_weights(layer.experts).values():
                draft = [code.draft_weight(expert, layer.input_dim) for expert in weight.detach()]
                self._weights.append((weight, torch.stack(draft)))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes as the draft inside, as the target again afterwards."""
        targets = [weight.data for weight, _ in self._weights]
        try:
            for weight, draft in self._weights:
                weight.data = draft
            yield
        finally:
            for (weight, _), target in zip(self._weights, targets, strict=True):
                weight.data = target
