"""The committed KV cache: transformers' own, rolled back and never reset.

Draft and verify passes append to it; what is not kept is taken back. Sliding windows and
convolutions can be taken back because they record their past; recurrent states cannot.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, cache_utils


class KvCache:
    """One request's cache and the number of tokens in it."""

    def __init__(self, model: PreTrainedModel, *, record: bool = True) -> None:
        """An empty cache for `model`.

        `record`: keep what a roll-back needs. Caches that cannot be rolled back anyway must not.
        """
        self.tokens = 0
        self.peak_bytes = 0
        self._record = record
        self._cache: Any = None  # an architecture with a cache of its own makes it in its forward
        if model._supports_default_dynamic_cache():  # type: ignore[operator]
            self._cache = DynamicCache(config=model.config)
            if record:
                self._cache.activate_past_recording()

    def forward(self, model: PreTrainedModel, inputs: Tensor, **extra: Any) -> Tensor:
        """Logits [T, V] of `inputs` [T] behind the cached tokens, which they now follow."""
        network: Any = model
        output = network(input_ids=inputs[None], cache=self._cache, use_cache=True, **extra)
        self._cache = output.cache
        logits: Tensor = output.logits[0]
        return logits

    def obstacle(self) -> str:
        """What cannot be rolled back, in words; empty when all can. Known after a forward."""
        stuck = {type(layer).__name__ for layer in self.layers() if not _rolls_back(layer)}
        if not stuck and not getattr(self._cache, "is_croppable", False):
            stuck.add(type(self._cache).__name__)
        return ", ".join(sorted(stuck))

    def layers(self) -> list[Any]:
        """The cache of each layer."""
        return list(getattr(self._cache, "layers", ()))

    def keep(self, passed: int, kept: int) -> None:
        """Passes appended `passed` tokens, of which the first `kept` stay."""
        self.peak_bytes = max(self.peak_bytes, self.nbytes())
        if self._record:
            self._cache.crop(kept - passed)
        elif kept != passed:
            raise RuntimeError("a cache that cannot be rolled back was asked to forget tokens")
        self.tokens += kept

    def nbytes(self) -> int:
        """Bytes of everything the cache holds now."""
        own = [] if self._cache is None else [self._cache]
        tensors = [tensor for kept in (*own, *self.layers()) for tensor in _tensors(vars(kept))]
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in memory.values())


def _rolls_back(layer: Any) -> bool:
    """Whether `crop` takes everything back.

    A cache layer that an architecture defines itself may keep state that an inherited `crop` does
    not know of; it is believed only where it has its own.
    """
    kind = type(layer)
    foreign = kind.__module__ != cache_utils.__name__
    return bool(layer.is_croppable) and not (foreign and "crop" not in vars(kind))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    entries = value if isinstance(value, list | tuple) else ()
    return [tensor for entry in entries for tensor in _tensors(entry)]
