"""Where routes are seen and draft weights put in: transformers' experts interface.

transformers 5 sends every mixture-of-experts layer through one function,
`(experts module, hidden states, top-k ids, top-k weights)`, chosen by name. We register ours under
the name `specter`. It records the routes for whoever listens and computes with the architecture's
own reference loop, which sums expert outputs in expert-id order. No architecture is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specter_runtime.quantizer import DraftCode
from specter_traces.errors import SpecterError

IMPLEMENTATION = "specter"
"""Name of our experts function in transformers' registry."""


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer: the module that holds its routed experts and the block around it."""

    index: int
    name: str
    experts: nn.Module
    block: nn.Module

    @property
    def num_experts(self) -> int:
        """Routed experts of this layer."""
        return int(next(iter(expert_weights(self.experts).values())).shape[0])


@dataclass(frozen=True)
class Route:
    """What one router chose for T tokens, highest weight first: ids and weights, both [T, K]."""

    ids: Tensor
    weights: Tensor


@dataclass
class _Tap:
    """The listener of the passes inside one `recording` block."""

    layers: dict[int, int]
    routes: dict[int, Route]
    compute: bool


_TAP: ContextVar[_Tap | None] = ContextVar("specter_route_tap", default=None)


def install(model: PreTrainedModel) -> tuple[ExpertLayer, ...]:
    """Send `model`'s experts through our function; its MoE layers in order.

    SpecterError when the model has none, or routes outside transformers' experts interface.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _recorded_forward)
    layers = _find_layers(model)
    if not layers:
        raise SpecterError(
            f"{type(model).__name__} has no routed experts in transformers' experts interface: "
            "choose a mixture-of-experts model that uses it (Llama-4 and JetMoE do not)"
        )
    model.set_experts_implementation(IMPLEMENTATION)
    for layer in layers:
        if getattr(layer.experts.config, "_experts_implementation", None) != IMPLEMENTATION:
            raise SpecterError(
                f"{type(model).__name__} does not let its experts be hooked at {layer.name}: "
                "this architecture cannot be captured"
            )
    return layers


@contextmanager
def recording(
    layers: tuple[ExpertLayer, ...], *, compute: bool = True
) -> Iterator[dict[int, Route]]:
    """Record the routes of the one pass that runs inside, by layer index.

    With `compute=False` the experts answer zeros: enough when only a router's choice is wanted.
    """
    tap = _Tap({id(layer.experts): layer.index for layer in layers}, {}, compute)
    token = _TAP.set(tap)
    try:
        yield tap.routes
    finally:
        _TAP.reset(token)


class DraftExperts:
    """Draft weights of every routed expert; everything else, biases too, stays the target's."""

    def __init__(self, layers: tuple[ExpertLayer, ...], code: DraftCode) -> None:
        """Quantize all routed experts of `layers`, one expert at a time."""
        self._weights: list[tuple[nn.Parameter, Tensor]] = []
        for layer in layers:
            input_dim = -2 if layer.experts.is_transposed else -1
            for weight in expert_weights(layer.experts).values():
                draft = [code.draft_weight(expert, input_dim) for expert in weight.detach()]
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


def expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The weight tensors of an experts module, [E, ., .]; its biases are not among them."""
    return {
        name: value for name, value in experts.named_parameters(recurse=False) if value.ndim == 3
    }


def _find_layers(model: nn.Module) -> tuple[ExpertLayer, ...]:
    found = [
        (name, module)
        for name, module in model.named_modules()
        if _uses_interface(module) and expert_weights(module)
    ]
    return tuple(
        ExpertLayer(index, name, module, model.get_submodule(name.rpartition(".")[0]))
        for index, (name, module) in enumerate(found)
    )


def _uses_interface(module: nn.Module) -> bool:
    """True for modules that transformers' `use_experts_implementation` has wrapped."""
    return isinstance(getattr(module, "is_transposed", None), bool) and hasattr(
        module, "_is_expert_parallel"
    )


def _recorded_forward(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function transformers calls for each MoE layer. hidden_states: [T, D]; top-k: [T, K]."""
    tap = _TAP.get()
    if tap is not None:
        _record(tap, experts, top_k_index, top_k_weights)
        if not tap.compute:
            return torch.zeros_like(hidden_states)
    return _reference_forward(experts)(experts, hidden_states, top_k_index, top_k_weights)


def _record(tap: _Tap, experts: nn.Module, ids: Tensor, weights: Tensor) -> None:
    layer = tap.layers.get(id(experts))
    if layer is None:
        return
    if layer in tap.routes:
        raise SpecterError(
            f"MoE layer {layer} ran twice in one pass: architectures that loop over their layers "
            "cannot be captured"
        )
    order = weights.float().argsort(dim=-1, descending=True, stable=True)
    tap.routes[layer] = Route(ids.gather(-1, order), weights.gather(-1, order))


def _reference_forward(experts: nn.Module) -> Callable[..., Tensor]:
    """The architecture's own loop over experts, which the interface wraps."""
    reference: Callable[..., Tensor] = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
    return reference
