"""The resident draft: every routed expert's weights in packed codes, decoded as they are used."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specter_runtime.experts import ExpertLayer
from specter_runtime.quantizer import DraftCode
from specter_runtime.quantizer.int4_kernel import Int4Kernel
from specter_runtime.quantizer.kernel_weight import KernelWeight, in_kernel_form
from specter_runtime.quantizer.packed import PackedWeight
from specter_runtime.weight_table import Source


class DraftWeights:
    """Packed weights of all layers, and one scratch matrix for each shape to decode into.

    A decoded weight is good until the next one of its shape and name is asked for: an experts loop
    uses each before it asks again.
    """

    def __init__(self, layers: tuple[ExpertLayer, ...], code: DraftCode) -> None:
        """Nothing is quantized yet: `add` every expert."""
        self.code = code
        self._layers = layers
        self._packed: list[dict[str, list[PackedWeight | Int4Kernel]]] = [{} for _ in layers]
        self._scratch: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        self._decoded_into: list[dict[str, Tensor]] = [{} for _ in layers]

    def add(self, layer: int, expert: int, weights: dict[str, Tensor]) -> None:
        """Quantize one expert, in the order of ids. UsageError where a weight cannot be coded."""
        packed = {
            name: PackedWeight.pack(self._layers[layer].as_rows(weight), self.code)
            for name, weight in weights.items()
        }
        self.add_packed(layer, expert, packed, weights)

    def add_packed(
        self,
        layer: int,
        expert: int,
        packed: dict[str, PackedWeight],
        weights: dict[str, Tensor],
    ) -> None:
        """Take one expert's codes, in the order of ids; `weights` tell shapes and number types."""
        for name, weight in weights.items():
            rows = self._layers[layer].as_rows(weight)
            kept = self._packed[layer].setdefault(name, [])
            if len(kept) != expert:
                raise RuntimeError(f"expert {expert} came after {len(kept)} others")
            kept.append(in_kernel_form(packed[name], rows.dtype))
            self._decoded_into[layer][name] = self._scratch.setdefault(
                (name, rows.shape, rows.dtype), torch.empty(rows.shape, dtype=rows.dtype)
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all codes and scales."""
        return sum(
            packed.nbytes
            for of_layer in self._packed
            for of_name in of_layer.values()
            for packed in of_name
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the matrices that weights are decoded into."""
        return sum(scratch.nbytes for scratch in self._scratch.values())

    def sources(self) -> list[dict[str, Source]]:
        """Where each layer's tables find an expert's draft weights."""
        return [
            {name: partial(self._decoded, layer, name) for name in of_layer}
            for layer, of_layer in enumerate(self._packed)
        ]

    def _decoded(self, layer: int, name: str, expert: int) -> Tensor:
        packed = self._packed[layer][name][expert]
        if isinstance(packed, Int4Kernel):
            # Not a tensor, but torch lets it take part in the one product that a loop makes of it.
            return KernelWeight(packed)  # type: ignore[return-value]
        scratch = self._decoded_into[layer][name]
        packed.decode_into(scratch)
        return self._layers[layer].as_loop_wants(scratch)
