"""The two passes of decoding: a draft that runs through, a target whose layers are visited."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer, reference
from specter_runtime.layer_run import LayerRun


class DraftPass:
    """A draft forward of one token: computes with resident codes and notes where it routed."""

    def __init__(
        self, layers: tuple[ExpertLayer, ...], experts: int, on_layer: Callable[[], object]
    ) -> None:
        """`experts`: of a layer, for flat indices. `on_layer` is called at every MoE layer."""
        self.routes: list[int] = []
        self._base = {id(layer.experts): layer.index * experts for layer in layers}
        self._count = {id(layer.experts): layer.num_experts for layer in layers}
        self._on_layer = on_layer

    def experts(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Every expert is there: run them all."""
        base, count = self._base[id(module)], self._count[id(module)]
        self.routes += [base + expert for row in ids.tolist() for expert in row if expert < count]
        self._on_layer()
        return reference(module)(module, hidden, ids, weights)


class TargetPass:
    """A target forward: each MoE layer is visited, and computes as its experts arrive."""

    def __init__(self, layers: tuple[ExpertLayer, ...]) -> None:
        self.visit: Callable[[int], object] = lambda layer: None
        self._index = {id(layer.experts): layer.index for layer in layers}
        self._run: LayerRun | None = None

    @property
    def run(self) -> LayerRun:
        """The layer being visited."""
        assert self._run is not None, "no MoE layer is being visited"
        return self._run

    def experts(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Let the layer be visited, then hand on what was computed."""
        self._run = LayerRun(module, hidden, ids, weights)
        self.visit(self._index[id(module)])
        output, self._run = self._run.output(), None
        return output
