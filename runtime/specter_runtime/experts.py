"""Where experts are seen and computed: transformers' experts interface.

transformers 5 sends every mixture-of-experts layer through one function,
`(experts module, hidden states, top-k ids, top-k weights)`, chosen by name. We register ours under
the name `specter`. It hands the call to the active pass: one that records routes, the draft, or the
target. Every pass computes with the architecture's own reference loop, which sums expert outputs in
expert-id order. No architecture is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

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
    num_experts: int

    @property
    def input_dim(self) -> int:
        """Which dimension of a weight is its input: -1, or -2 when stored transposed."""
        return -2 if self.experts.is_transposed else -1

    def as_rows(self, weight: Tensor) -> Tensor:
        """One expert's matrix as rows of inputs [out, in], however the loop wants it; a view."""
        return weight if self.input_dim == -1 else weight.movedim(-2, -1)

    def as_loop_wants(self, rows: Tensor) -> Tensor:
        """Rows of inputs as the loop wants the matrix; a view. It undoes `as_rows`."""
        return self.as_rows(rows)


class ExpertPass(Protocol):
    """Who computes the routed experts of a forward."""

    def experts(self, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum of a layer's routed experts. hidden: [T, D]; ids, weights: [T, K]."""


_PASS: ContextVar[ExpertPass | None] = ContextVar("specter_expert_pass", default=None)


def install(model: PreTrainedModel) -> tuple[ExpertLayer, ...]:
    """Send `model`'s experts through our function; its MoE layers in order.

    SpecterError when the model has none, or routes outside transformers' experts interface.
    """
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dispatch)
    layers = find_layers(model)
    if not layers and any(_uses_interface(module) for module in model.modules()):
        raise SpecterError(
            f"the experts of this {type(model).__name__} were moved out before: load it again, or "
            "share the loaded model among sessions"
        )
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
                "this architecture cannot be captured or run"
            )
    return layers


@contextmanager
def running(active: ExpertPass) -> Iterator[None]:
    """Forwards inside compute their experts through `active`."""
    token = _PASS.set(active)
    try:
        yield
    finally:
        _PASS.reset(token)


def reference(experts: nn.Module) -> Callable[..., Tensor]:
    """The architecture's own loop over experts, which the interface wraps."""
    loop: Callable[..., Tensor] = type(experts).forward.__wrapped__  # type: ignore[attr-defined]
    return loop


def expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """The weight tensors of an experts module, [E, ., .]; its biases are not among them."""
    return {
        name: value for name, value in experts.named_parameters(recurse=False) if value.ndim == 3
    }


def find_layers(model: nn.Module) -> tuple[ExpertLayer, ...]:
    """The MoE layers of a model in order, nothing changed; maybe none."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if _uses_interface(module) and expert_weights(module)
    ]
    return tuple(
        ExpertLayer(
            index,
            name,
            module,
            model.get_submodule(name.rpartition(".")[0]),
            int(next(iter(expert_weights(module).values())).shape[0]),
        )
        for index, (name, module) in enumerate(found)
    )


def _uses_interface(module: nn.Module) -> bool:
    """True for modules that transformers' `use_experts_implementation` has wrapped."""
    return isinstance(getattr(module, "is_transposed", None), bool) and hasattr(
        module, "_is_expert_parallel"
    )


def _dispatch(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The function transformers calls for each MoE layer. hidden_states: [T, D]; top-k: [T, K]."""
    active = _PASS.get()
    if active is None:
        return reference(experts)(experts, hidden_states, top_k_index, top_k_weights)
    return active.experts(experts, hidden_states, top_k_index, top_k_weights)
