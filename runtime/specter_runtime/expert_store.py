"""Every routed expert's weights in host memory, each as one contiguous run that a load copies.

A checkpoint keeps a layer's experts together, matrix by matrix. A load wants one expert's matrices
together. The store rearranges them once, layer by layer, and takes the originals out of the model,
so that the weights exist twice for one layer at most.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.freed_memory import give_back
from specter_runtime.page_lock import PageLock
from specter_runtime.weight_table import Source
from specter_traces.errors import SpecterError

ALIGNMENT_BYTES = 64
"""Runs and parts start at multiples of this: a cache line, and what wide loads like."""

Watch = Callable[[int, int, dict[str, Tensor]], None]
"""Told (layer, expert, weights) of each expert as it is stored; the tensors are the store's."""


@dataclass(frozen=True)
class Part:
    """One weight matrix inside an expert's run, `offset` bytes from its start."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, without padding."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size

    def view(self, run: Tensor) -> Tensor:
        """The matrix inside `run`, an expert's bytes (uint8, 1-D); nothing is copied."""
        data = run[self.offset : self.offset + self.nbytes]
        return data.view(self.dtype).view(self.shape)


class ExpertStore:
    """Host memory of all routed experts: L layers, one buffer each, one run for each expert."""

    def __init__(self, buffers: list[_LayerBuffer]) -> None:
        """Use `take`, which fills the buffers."""
        self._buffers = tuple(buffers)
        self._lock: PageLock | None = None

    @classmethod
    def take(cls, layers: tuple[ExpertLayer, ...], watch: Watch | None = None) -> ExpertStore:
        """Move the experts of `layers` here; their modules lose the weights, and keep the biases.

        `watch` sees every expert just after it was stored. SpecterError when a layer's weights
        disagree about the number of experts; the model is unusable then.
        """
        buffers = []
        for index, layer in enumerate(layers):
            buffer = _LayerBuffer(layer)
            buffer.fill(layer, index, watch)
            remove_weights(layer.experts)
            give_back()
            buffers.append(buffer)
        return cls(buffers)

    @property
    def layers(self) -> int:
        """MoE layers, L."""
        return len(self._buffers)

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts of each layer."""
        return tuple(buffer.experts for buffer in self._buffers)

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The matrices of an expert, for each layer."""
        return tuple(buffer.parts for buffer in self._buffers)

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert's run, padding included, for each layer: what a load copies."""
        return tuple(buffer.expert_bytes for buffer in self._buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together."""
        return sum(buffer.experts * buffer.expert_bytes for buffer in self._buffers)

    @property
    def load_bytes(self) -> float:
        """Bytes of one load: a mean, where layers have experts of different sizes."""
        return self.nbytes / sum(self.experts)

    @property
    def scratch_bytes(self) -> int:
        """Nothing: a slot holds the matrices as they are computed with."""
        return 0

    def views(self, layer: int, expert: int, run: Tensor) -> dict[str, Tensor]:
        """The matrices inside a copy of an expert's run."""
        return {part.name: part.view(run) for part in self._buffers[layer].parts}

    def sources(self, views: Sequence[dict[str, list[Tensor | None]]]) -> list[dict[str, Source]]:
        """A resident expert's matrices are its views."""
        return [
            {name: of_name.__getitem__ for name, of_name in of_layer.items()}  # type: ignore[misc]
            for of_layer in views
        ]

    def weights(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The matrices of one expert by name, as views: writing to them breaks the checksum."""
        return self.views(layer, expert, self.run(layer, expert))

    def checksum(self, layer: int, expert: int) -> int:
        """CRC-32 of the expert's weights as the model held them, part by part."""
        self.run(layer, expert)
        return self._buffers[layer].checksums[expert]

    def verify(self) -> None:
        """Read everything again; SpecterError naming the first expert that is not as loaded."""
        for layer, buffer in enumerate(self._buffers):
            for expert in range(buffer.experts):
                found = checksum(*self.weights(layer, expert).values())
                if found != buffer.checksums[expert]:
                    raise SpecterError(
                        f"expert {expert} of MoE layer {layer} ({buffer.name}) changed in host "
                        f"memory since it was loaded (checksum {found:08x}, was "
                        f"{buffer.checksums[expert]:08x}): load the model again"
                    )

    def lock_pages(self, limit_bytes: int | None = None) -> int:
        """Page-lock up to `limit_bytes` (None: all), from the first layer on; bytes locked.

        Never an error: less is locked where the system allows less. Called again, it starts anew.
        """
        if self._lock is not None:
            self._lock.close()
        self._lock = PageLock()
        self._lock.lock_all([buffer.memory for buffer in self._buffers], limit_bytes)
        return self._lock.locked_bytes

    def close(self) -> None:
        """Unlock pages and let go of the memory, which views handed out keep alive."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        for buffer in self._buffers:
            buffer.memory = torch.empty(0, dtype=torch.uint8)

    def run(self, layer: int, expert: int) -> Tensor:
        """The bytes of one expert, uint8, as a load copies them; IndexError when there is none."""
        if not (0 <= layer < self.layers and 0 <= expert < self._buffers[layer].experts):
            raise IndexError(f"no expert {expert} in MoE layer {layer}")
        return self._buffers[layer].run(expert)


class _LayerBuffer:
    """One layer's experts in one page-aligned buffer."""

    def __init__(self, layer: ExpertLayer) -> None:
        weights = expert_weights(layer.experts)
        counts = {name: weight.shape[0] for name, weight in weights.items()}
        if len(set(counts.values())) != 1:
            raise SpecterError(
                f"{layer.name} holds weights of different numbers of experts: {counts}"
            )
        self.name = layer.name
        self.experts = next(iter(counts.values()))
        self.parts, self.expert_bytes = arranged(weights)
        self.memory = page_memory(self.experts * self.expert_bytes)
        self.checksums: list[int] = []

    def run(self, expert: int) -> Tensor:
        """The bytes of one expert."""
        start = expert * self.expert_bytes
        return self.memory[start : start + self.expert_bytes]

    def fill(self, layer: ExpertLayer, index: int, watch: Watch | None) -> None:
        """Copy every expert of `layer` here, keeping the checksum of what was copied from."""
        weights = expert_weights(layer.experts)
        for expert in range(self.experts):
            run = self.run(expert)
            sources = {name: weight.detach()[expert] for name, weight in weights.items()}
            for part in self.parts:
                # One plain copy: torch's threads would wait for each other at every small matrix.
                _data(part.view(run))[:] = _data(sources[part.name].contiguous())
            self.checksums.append(checksum(*sources.values()))
            if watch is not None:
                watch(index, expert, {part.name: part.view(run) for part in self.parts})


def arranged(weights: dict[str, nn.Parameter]) -> tuple[tuple[Part, ...], int]:
    """The parts of one expert's run, and the run's bytes."""
    parts: list[Part] = []
    end = 0
    for name, weight in weights.items():
        part = Part(name, tuple(weight.shape[1:]), weight.dtype, end)
        parts.append(part)
        end = aligned(part.offset + part.nbytes)
    assert all(first.offset + first.nbytes <= second.offset for first, second in pairwise(parts))
    return tuple(parts), end


def aligned(size: int) -> int:
    """`size` rounded up to whole cache lines."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def page_memory(size: int) -> Tensor:
    """Zeroed memory that shares no page with anything else, and goes back whole when dropped."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)


def checksum(*weights: Tensor) -> int:
    """CRC-32 of the bytes of tensors, one after the other."""
    value = 0
    for weight in weights:
        value = zlib.crc32(_data(weight.contiguous()), value)
    return value


def _data(weight: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return memoryview(weight.view(-1).view(torch.uint8).numpy().data)


def remove_weights(experts: nn.Module) -> None:
    """Free the weights: once out of the module nothing refers to them."""
    for name in expert_weights(experts):
        del experts._parameters[name]
