"""Coded experts in host memory: refinements only, for bases that stay on the device.

An expert's run is the refinements of its matrices, one behind the other. A slot holds a copy of the
run; its matrices are expanded, each with its base, whenever they are computed with. The exact
weights are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specter_runtime.codec import Coding, encode, expand_into
from specter_runtime.draft_weights import DraftWeights
from specter_runtime.expert_store import (
    Part,
    aligned,
    arranged,
    checksum,
    page_memory,
    remove_weights,
)
from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.freed_memory import give_back
from specter_runtime.page_lock import PageLock
from specter_runtime.quantizer.packed import PackedWeight
from specter_runtime.weight_table import Source
from specter_traces.errors import SpecterError


@dataclass(frozen=True)
class CodedLayer:
    """One layer: where each expert's run lies in `memory`, and each matrix's refinement in a run.

    begins: [E+1] offsets of runs; places: by expert and matrix, begin and end inside the run;
    checksums: CRC-32 of each run.
    """

    name: str
    parts: tuple[Part, ...]
    memory: Tensor
    begins: tuple[int, ...]
    places: tuple[dict[str, tuple[int, int]], ...]
    bases: tuple[dict[str, PackedWeight | None], ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class CodedExperts:
    """All experts of a model in coded form, in memory: what a store is made of."""

    coding: Coding
    layers: tuple[CodedLayer, ...]


class CodedStore:
    """Host memory of all routed experts in coded form, and their bases."""

    def __init__(
        self, layers: tuple[ExpertLayer, ...], coding: Coding, coded: Sequence[CodedLayer]
    ) -> None:
        """Use `take`."""
        self.coding = coding
        self._layers, self._coded = layers, tuple(coded)
        self._lock: PageLock | None = None
        self._scratch = self._new_scratch()

    @classmethod
    def take(cls, layers: tuple[ExpertLayer, ...], coding: Coding) -> CodedStore:
        """Encode the experts of `layers`, layer by layer; their modules lose the weights.

        Every matrix is verified to the bit as it is encoded. SpecterError for weights of a type
        that cannot be coded.
        """
        coded = []
        for layer in layers:
            coded.append(_encoded(layer, coding))
            remove_weights(layer.experts)
            give_back()
        return cls(layers, coding, coded)

    @classmethod
    def of(cls, layers: tuple[ExpertLayer, ...], ready: CodedExperts) -> CodedStore:
        """Experts that were coded before, as they were read from a file; nothing is encoded."""
        for layer in layers:
            remove_weights(layer.experts)
        return cls(layers, ready.coding, ready.layers)

    @property
    def ready(self) -> CodedExperts:
        """The coded experts themselves."""
        return CodedExperts(self.coding, self._coded)

    @property
    def layers(self) -> int:
        """MoE layers, L."""
        return len(self._coded)

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of each layer."""
        return tuple(len(coded.places) for coded in self._coded)

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The matrices of an expert as they are computed with, for each layer."""
        return tuple(coded.parts for coded in self._coded)

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of the longest run of each layer: what a slot has."""
        return tuple(
            aligned(max(coded.begins[e + 1] - coded.begins[e] for e in range(len(coded.places))))
            for coded in self._coded
        )

    @property
    def nbytes(self) -> int:
        """Host bytes of all runs."""
        return sum(coded.begins[-1] for coded in self._coded)

    @property
    def load_bytes(self) -> float:
        """Bytes of one load: a mean over all experts."""
        return self.nbytes / sum(self.experts)

    @property
    def base_bytes(self) -> int:
        """Device bytes of all bases."""
        return sum(
            base.nbytes
            for coded in self._coded
            for of_expert in coded.bases
            for base in of_expert.values()
            if base is not None
        )

    @property
    def scratch_bytes(self) -> int:
        """Device bytes of the matrices that experts are expanded into."""
        memory = {
            scratch.data_ptr(): scratch
            for of_layer in self._scratch
            for scratch in of_layer.values()
        }
        return sum(scratch.nbytes for scratch in memory.values())

    def run(self, layer: int, expert: int) -> Tensor:
        """The bytes of one expert's refinements; IndexError when there is none."""
        if not (0 <= layer < self.layers and 0 <= expert < len(self._coded[layer].places)):
            raise IndexError(f"no expert {expert} in MoE layer {layer}")
        begins = self._coded[layer].begins
        return self._coded[layer].memory[begins[expert] : begins[expert + 1]]

    def views(self, layer: int, expert: int, run: Tensor) -> dict[str, Tensor]:
        """The refinement of each matrix inside a copy of an expert's run."""
        places = self._coded[layer].places[expert]
        return {name: run[begin:end] for name, (begin, end) in places.items()}

    def sources(self, views: Sequence[dict[str, list[Tensor | None]]]) -> list[dict[str, Source]]:
        """A resident expert's matrices, expanded from its slot and its base when asked for.

        A matrix is good until the next of its name is asked for: a loop uses each before that.
        """
        return [
            {
                name: partial(self._expanded, layer, name, of_name)
                for name, of_name in by_name.items()
            }
            for layer, by_name in enumerate(views)
        ]

    def weights(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The exact matrices of one expert, new tensors."""
        refinements = self.views(layer, expert, self.run(layer, expert))
        weights = {}
        for name, scratch in self._scratch[layer].items():
            rows = torch.empty_like(scratch)
            expand_into(self._coded[layer].bases[expert][name], refinements[name], rows)
            weights[name] = self._layers[layer].as_loop_wants(rows)
        return weights

    def draft(self) -> DraftWeights:
        """The draft that the bases are, in the same memory; SpecterError where there is no base."""
        if self.coding.draft_code is None:
            raise SpecterError("experts coded without a base have no draft")
        draft = DraftWeights(self._layers, self.coding.draft_code)
        for layer, coded in enumerate(self._coded):
            shaped = {
                name: self._layers[layer].as_loop_wants(scratch)
                for name, scratch in self._scratch[layer].items()
            }
            for expert, bases in enumerate(coded.bases):
                present = {name: base for name, base in bases.items() if base is not None}
                draft.add_packed(layer, expert, present, shaped)
        return draft

    def verify(self) -> None:
        """Read everything again; SpecterError naming the first expert that is not as encoded."""
        for layer, coded in enumerate(self._coded):
            for expert, kept in enumerate(coded.checksums):
                if checksum(self.run(layer, expert)) != kept:
                    raise SpecterError(
                        f"expert {expert} of MoE layer {layer} ({coded.name}) changed in host "
                        "memory since it was encoded: load the model again"
                    )

    def lock_pages(self, limit_bytes: int | None = None) -> int:
        """Page-lock up to `limit_bytes` (None: all); bytes locked. Never an error."""
        if self._lock is not None:
            self._lock.close()
        self._lock = PageLock()
        self._lock.lock_all([coded.memory for coded in self._coded], limit_bytes)
        return self._lock.locked_bytes

    def close(self) -> None:
        """Unlock pages and let go of the memory, which views handed out keep alive."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        nothing = torch.empty(0, dtype=torch.uint8)
        self._coded = tuple(replace(coded, memory=nothing) for coded in self._coded)

    def _expanded(self, layer: int, name: str, views: list[Tensor | None], expert: int) -> Tensor:
        refinement, scratch = views[expert], self._scratch[layer][name]
        assert refinement is not None, "an expert is used without a lease"
        expand_into(self._coded[layer].bases[expert][name], refinement, scratch)
        return self._layers[layer].as_loop_wants(scratch)

    def _new_scratch(self) -> list[dict[str, Tensor]]:
        """Rows [out, in] to expand each matrix into; layers of equal shapes share them."""
        shared: dict[tuple[str, torch.Size, torch.dtype], Tensor] = {}
        scratch = []
        for layer, coded in zip(self._layers, self._coded, strict=True):
            of_layer = {}
            for part in coded.parts:
                rows = layer.as_rows(torch.empty(part.shape, dtype=part.dtype)).contiguous()
                of_layer[part.name] = shared.setdefault((part.name, rows.shape, rows.dtype), rows)
            scratch.append(of_layer)
        return scratch


def _encoded(layer: ExpertLayer, coding: Coding) -> CodedLayer:
    """One layer's experts, encoded into one piece of memory."""
    weights = expert_weights(layer.experts)
    runs, places, bases = [], [], []
    for expert in range(layer.num_experts):
        pieces, placed, based, end = [], {}, {}, 0
        for name, weight in weights.items():
            coded = encode(layer.as_rows(weight.detach()[expert]).contiguous(), coding)
            pieces.append(coded.refinement)
            placed[name] = (end, end + len(coded.refinement))
            based[name] = coded.base
            end += len(coded.refinement)
        runs.append(torch.cat(pieces))
        places.append(placed)
        bases.append(based)
    begins = [0]
    for run in runs:
        begins.append(begins[-1] + len(run))
    memory = page_memory(begins[-1])
    torch.cat(runs, out=memory)
    return CodedLayer(
        layer.name,
        arranged(weights)[0],
        memory,
        tuple(begins),
        tuple(places),
        tuple(bases),
        tuple(checksum(run) for run in runs),
    )
