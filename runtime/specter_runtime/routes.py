"""Recording what routers choose, in a pass that computes as the model stands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer, reference, running
from specter_traces.errors import SpecterError


@dataclass(frozen=True)
class Route:
    """What one router chose for T tokens, highest weight first: ids and weights, both [T, K]."""

    ids: Tensor
    weights: Tensor


def ranked(ids: Tensor, weights: Tensor) -> Route:
    """A route in rank order; routers may answer in any. ids, weights: [T, K]."""
    order = weights.float().argsort(dim=-1, descending=True, stable=True)
    return Route(ids.gather(-1, order), weights.gather(-1, order))


@contextmanager
def recording(
    layers: tuple[ExpertLayer, ...], *, compute: bool = True, repeated: bool = False
) -> Iterator[dict[int, Route]]:
    """Record the routes of the one pass that runs inside, by layer index.

    With `compute=False` the experts answer zeros: enough when only a router's choice is wanted.
    SpecterError when a layer runs twice, unless `repeated` layers are fine; then the last counts.
    """
    recorder = _Recorder(layers, compute, repeated)
    with running(recorder):
        yield recorder.routes


class _Recorder:
    """The pass inside one `recording` block."""

    def __init__(self, layers: tuple[ExpertLayer, ...], compute: bool, repeated: bool) -> None:
        self.routes: dict[int, Route] = {}
        self._layers = {id(layer.experts): layer.index for layer in layers}
        self._compute, self._repeated = compute, repeated

    def experts(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Record, then compute or answer zeros."""
        layer = self._layers.get(id(module))
        if layer in self.routes and not self._repeated:
            raise SpecterError(
                f"MoE layer {layer} ran twice in one pass: architectures that loop over their "
                "layers cannot be captured"
            )
        if layer is not None:
            self.routes[layer] = ranked(ids, weights)
        if not self._compute:
            return torch.zeros_like(hidden)
        return reference(module)(module, hidden, ids, weights)
