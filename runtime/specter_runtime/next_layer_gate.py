"""The next-layer gate: what a router would choose if it were asked one MoE layer early.

Layer l's router is applied to the hidden state that entered layer l-1's MoE block. The whole block
of layer l is run on that state, with experts that answer zeros, so that no architecture's router
has to be known. Blocks that need more than a hidden state cannot be asked; then there is no column.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer
from specter_runtime.routes import recording


class BlockInputs:
    """Hidden states that entered each MoE block in one pass, while the hooks are in place."""

    def __init__(self, layers: tuple[ExpertLayer, ...]) -> None:
        """Listen to the blocks of `layers` inside `listening`."""
        self._layers = layers
        self._states: dict[int, Tensor] = {}
        self.obstacle: str | None = None
        """Why the gate cannot be asked, once a pass has shown it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect the inputs of the pass that runs inside."""
        self._states.clear()
        hooks = [
            layer.block.register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer in self._layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def gate_ids(self) -> Tensor | None:
        """Choices of layers 1.. one layer early: [T, L-1, K], or None with `obstacle` set."""
        if self.obstacle is None and len(self._states) != len(self._layers):
            self.obstacle = "the module around the experts is not called as a block"
        if self.obstacle is not None or len(self._layers) < 2:
            return None
        chosen = [_ask(later, self._states[early.index]) for early, later in pairwise(self._layers)]
        return torch.stack(chosen, 1)

    def next_choice(self, layer: int) -> list[int]:
        """Experts that layer+1 picks for what entered `layer` in the pass under way, ascending.

        Empty after the last layer, and where the gate cannot be asked.
        """
        state = self._states.get(layer)
        if self.obstacle is not None or state is None or layer + 1 >= len(self._layers):
            return []
        ids = _ask(self._layers[layer + 1], state)
        return sorted(set(ids.flatten().tolist()))

    def _hook(self, layer: ExpertLayer) -> Any:
        def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [*args, *kwargs.values()]
            if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
                self.obstacle = "the block around the experts takes more than a hidden state"
                return
            self._states[layer.index] = inputs[0]

        return remember


def _ask(layer: ExpertLayer, state: Tensor) -> Tensor:
    """Experts that the router of `layer` picks for `state`: ids [T, K], highest weight first."""
    with recording((layer,), compute=False) as routes:
        layer.block(state)
    return routes[layer.index].ids
