"""What a model is like, seen in one forward that computes no experts: top-k, cache, dense bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specter_runtime.experts import ExpertLayer
from specter_runtime.kv_cache import KvCache
from specter_runtime.routes import recording
from specter_traces.errors import SpecterError

_TOKENS = (4, 8)


@dataclass(frozen=True)
class Survey:
    """Facts of a model.

    Attributes:
        top_k: experts a token of one layer, at most.
        kv_token_bytes, kv_base_bytes: the cache of n tokens is at most base + n * token bytes.
        cache_layers: layers that keep a cache.
        obstacle: cache layers that cannot be rolled back, in words; empty when all can.
        dense_bytes: parameters and buffers other than routed experts' weights.
    """

    top_k: int
    kv_token_bytes: int
    kv_base_bytes: int
    cache_layers: int
    obstacle: str
    dense_bytes: int

    def kv_bytes(self, tokens: int) -> int:
        """The cache of `tokens` tokens, and the copy of one layer that growing it makes."""
        all_layers = self.kv_base_bytes + self.kv_token_bytes * tokens
        return all_layers + self.kv_token_bytes * tokens // max(1, self.cache_layers)


def survey(model: PreTrainedModel, layers: tuple[ExpertLayer, ...]) -> Survey:
    """Look at a model; its experts' weights may be gone already.

    SpecterError when an MoE layer does not route every token of a forward.
    """
    sizes, caches, top_k = [], [], 0
    for tokens in _TOKENS:
        cache = KvCache(model)
        with recording(layers, compute=False, repeated=True) as routes, torch.inference_mode():
            cache.forward(model, torch.zeros(tokens, dtype=torch.long))
        silent = [layer.name for layer in layers if layer.index not in routes]
        if silent or any(route.ids.shape[0] != tokens for route in routes.values()):
            raise SpecterError(
                f"{type(model).__name__}: {silent[0] if silent else 'an MoE layer'} did not route "
                "every token of a forward: this architecture cannot be run"
            )
        top_k = max(route.ids.shape[-1] for route in routes.values())
        sizes.append(cache.nbytes())
        caches.append(cache)
    token_bytes = -((sizes[0] - sizes[1]) // (_TOKENS[1] - _TOKENS[0]))
    return Survey(
        top_k,
        token_bytes,
        max(0, sizes[0] - token_bytes * _TOKENS[0]),
        len(caches[0].layers()),
        caches[1].obstacle(),
        _bytes_of([*model.parameters(), *model.buffers()])
        - _bytes_of(weight for layer in layers for weight in _routed(layer)),
    )


def _routed(layer: ExpertLayer) -> list[Tensor]:
    return [value for value in layer.experts.parameters(recurse=False) if value.ndim == 3]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each memory counted once."""
    seen = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    return sum(seen.values())
