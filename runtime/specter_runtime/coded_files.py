"""Checkpoints whose routed experts are stored in coded form, in one safetensors file.

`coded.safetensors` holds, for MoE layer i of E experts with M matrices each:

    coded.i.refinements       bytes of all experts' refinements, expert by expert, matrix by matrix
    coded.i.sizes             [E, M] bytes of each
    coded.i.checksums         [E, M] CRC-32 of each with its base, see `codec.stream_checksum`
    coded.i.MATRIX.codes      [E, rows, bytes of a row] of the base
    coded.i.MATRIX.scales     [E, rows, groups], FP16

Everything else keeps its name and its bytes; `coded.checksums` are the CRC-32 of these tensors in
the order of their names. `coded_header` says what they mean, which rows of which matrix each tensor
of the original is, and how the original's files begin, so that these can be restored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from specter_runtime.codec import expand_into, stream_checksum
from specter_runtime.codec.codec import base_table
from specter_runtime.coded_header import CodedHeader, CodedLayerFacts, Origin, read_coded_header
from specter_runtime.coded_store import CodedExperts, CodedLayer
from specter_runtime.expert_store import arranged, checksum, page_memory
from specter_runtime.experts import ExpertLayer, expert_weights
from specter_runtime.model_loading import Progress
from specter_runtime.quantizer import code_bytes
from specter_runtime.quantizer.packed import PackedWeight
from specter_runtime.weight_files import Source, StoredTensor, read_header
from specter_traces.errors import SpecterError, UsageError

CODED_FILE = "coded.safetensors"
"""Name of the weight file of a coded checkpoint."""

PREFIX = "coded."
"""Begins the names of tensors that the original does not have."""

Bases = dict[str, PackedWeight | None]
Places = dict[str, tuple[int, int]]


def is_coded(folder: Path) -> bool:
    """Whether `folder` holds a coded checkpoint."""
    return (folder / CODED_FILE).is_file()


class CodedFile:
    """An open coded checkpoint. Tensors are read when asked for, and verified then."""

    def __init__(self, folder: Path) -> None:
        """UsageError for a file that is broken, of another version, or of somebody else."""
        self.path = folder / CODED_FILE
        self.tensors = {tensor.name: tensor for tensor in read_header(self.path)}
        self.header: CodedHeader = read_coded_header(self.path)
        self.plain = self._plain()
        for layer, facts in enumerate(self.header.layers):
            refinements = self.tensors.get(f"{PREFIX}{layer}.refinements")
            if refinements is None or refinements.shape != (refinements.nbytes,):
                raise self.broken(f"it has no bytes {PREFIX}{layer}.refinements")
            for name, dtype, shape in _expected(self.header, layer, facts):
                found = self.tensors.get(name)
                if found is None or (found.dtype, found.shape) != (dtype, shape):
                    raise self.broken(f"it has no {name} of {dtype} {list(shape)}")

    def dtype_for(self, asked: torch.dtype | None) -> torch.dtype:
        """What to compute in, None being the coded type. UsageError for another."""
        if asked not in (None, self.header.torch_dtype):
            raise UsageError(
                f"the experts of {self.path.parent} are coded as {self.header.dtype}: leave out "
                "--dtype, or encode the original checkpoint with another"
            )
        return self.header.torch_dtype

    def original(self) -> dict[str, Source]:
        """Every tensor of the original checkpoint; experts are expanded as they are read."""
        expansion = _Expansion(self)
        return self.plain | {
            origin.name: _Expanded(expansion, origin) for origin in self.header.origins
        }

    def experts(
        self, layers: tuple[ExpertLayer, ...], progress: Progress | None = None
    ) -> CodedExperts:
        """The coded experts in host memory for the layers of a model, which has no weights of them.

        `progress` is told of these bytes only. UsageError when they are damaged, or the model's are
        others.
        """
        facts = self.header.layers
        if [_facts_of(layer) for layer in layers] != [_shapes(each) for each in facts]:
            raise UsageError(
                f"{self.path} holds the experts of another model than its config.json describes: "
                "copy both again"
            )
        read = []
        sizes = [self.layer_bytes(layer) for layer in range(len(facts))]
        for layer in layers:
            read.append(self._layer(layer, facts[layer.index]))
            if progress is not None:
                progress(sum(sizes[: len(read)]), sum(sizes))
        return CodedExperts(self.header.coding, tuple(read))

    def layer_bytes(self, layer: int) -> int:
        """Bytes of a layer's experts in the file."""
        start = f"{PREFIX}{layer}."
        return sum(each.nbytes for name, each in self.tensors.items() if name.startswith(start))

    def refinements(self, layer: int) -> StoredTensor:
        """All of a layer's refinements."""
        return self.tensors[f"{PREFIX}{layer}.refinements"]

    def places(self, layer: int) -> tuple[list[int], list[Places]]:
        """Where the runs of a layer begin, [E+1], and where in its run each matrix lies."""
        names = [matrix.name for matrix in self.header.layers[layer].matrices]
        sizes: list[list[int]] = self.tensors[f"{PREFIX}{layer}.sizes"].read().tolist()
        begins, places = [0], []
        for of_expert in sizes:
            ends = list(accumulate(of_expert, initial=0))
            places.append(dict(zip(names, pairwise(ends), strict=True)))
            begins.append(begins[-1] + ends[-1])
        good = all(size > 0 for of_expert in sizes for size in of_expert)
        if not good or begins[-1] != self.refinements(layer).nbytes:
            raise self.broken(f"{PREFIX}{layer}.sizes do not add up")
        return begins, places

    def checksums(self, layer: int) -> list[list[int]]:
        """The checksum of each expert's matrices."""
        kept: list[list[int]] = self.tensors[f"{PREFIX}{layer}.checksums"].read().tolist()
        return kept

    def base_parts(
        self, layer: int, kind: Literal["codes", "scales"], expert: int | None = None
    ) -> dict[str, Tensor]:
        """Codes or scales of each matrix, of one expert or of all."""
        parts = {}
        for matrix in self.header.layers[layer].matrices:
            stored = self.tensors[f"{PREFIX}{layer}.{matrix.name}.{kind}"]
            parts[matrix.name] = (stored if expert is None else stored.row(expert)).read()
        return parts

    def base(self, layer: int, codes: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> Bases:
        """One expert's base, from its codes and scales."""
        code = self.header.coding.draft_code
        assert code is not None
        widths = {each.name: each.width for each in self.header.layers[layer].matrices}
        return {
            name: PackedWeight(code, width, codes[name], scales[name], base_table(code.bits))
            for name, width in widths.items()
        }

    def verify(
        self, layer: int, expert: int, run: Tensor, places: Places, bases: Bases, kept: list[int]
    ) -> None:
        """UsageError unless every matrix of an expert is as it was encoded."""
        for (name, (begin, end)), value in zip(places.items(), kept, strict=True):
            if not _is_whole(bases[name], run[begin:end], value):
                raise self.broken(f"{name} of expert {expert} of MoE layer {layer} is damaged")

    def broken(self, why: str) -> UsageError:
        """The error of a file that cannot be used."""
        return UsageError(
            f"{self.path} cannot be used: {why}; copy it or encode the checkpoint again"
        )

    def _plain(self) -> dict[str, Source]:
        names = sorted(name for name in self.tensors if not name.startswith(PREFIX))
        kept = self.tensors.get(f"{PREFIX}checksums")
        if kept is None or kept.dtype is not torch.int64 or kept.shape != (len(names),):
            raise self.broken("the checksums of its plain tensors are not there")
        values: list[int] = kept.read().tolist()
        return {
            name: _Verified(self, self.tensors[name], value)
            for name, value in zip(names, values, strict=True)
        }

    def _layer(self, layer: ExpertLayer, facts: CodedLayerFacts) -> CodedLayer:
        index, stored = layer.index, self.refinements(layer.index)
        begins, places = self.places(index)
        memory = page_memory(stored.nbytes)
        stored.read_into(memory)
        codes, scales = self.base_parts(index, "codes"), self.base_parts(index, "scales")
        kept, bases, checksums = self.checksums(index), [], []
        for expert in range(facts.experts):
            base = self.base(
                index,
                {name: tensor[expert] for name, tensor in codes.items()},
                {name: tensor[expert] for name, tensor in scales.items()},
            )
            run = memory[begins[expert] : begins[expert + 1]]
            self.verify(index, expert, run, places[expert], base, kept[expert])
            bases.append(base)
            checksums.append(checksum(run))
        parts = arranged(expert_weights(layer.experts))[0]
        return CodedLayer(
            layer.name, parts, memory, tuple(begins), tuple(places), tuple(bases), tuple(checksums)
        )


class _Expansion:
    """Expands experts of a file one after the other, and keeps the last."""

    def __init__(self, file: CodedFile) -> None:
        self.file = file
        self._last: tuple[int, int] | None = None
        self._rows: dict[str, Tensor] = {}
        self._index: dict[int, tuple[list[int], list[Places], list[list[int]]]] = {}

    def rows(self, layer: int, expert: int) -> dict[str, Tensor]:
        """One expert's matrices as rows of inputs."""
        if self._last != (layer, expert):
            self._rows, self._last = self._expand(layer, expert), (layer, expert)
        return self._rows

    def _expand(self, layer: int, expert: int) -> dict[str, Tensor]:
        file, facts = self.file, self.file.header.layers[layer]
        if layer not in self._index:
            self._index = {layer: (*file.places(layer), file.checksums(layer))}
        begins, places, kept = self._index[layer]
        run = file.refinements(layer).part(begins[expert], begins[expert + 1]).read()
        codes = file.base_parts(layer, "codes", expert)
        base = file.base(layer, codes, file.base_parts(layer, "scales", expert))
        file.verify(layer, expert, run, places[expert], base, kept[expert])
        rows = {}
        for matrix in facts.matrices:
            begin, end = places[expert][matrix.name]
            out = torch.empty(matrix.rows, matrix.width, dtype=file.header.torch_dtype)
            expand_into(base[matrix.name], run[begin:end], out)
            rows[matrix.name] = out
        return rows


class _Expanded:
    """A tensor of the original that is expanded as it is read."""

    def __init__(self, expansion: _Expansion, origin: Origin) -> None:
        self._expansion, self._origin = expansion, origin
        header = expansion.file.header
        facts = header.layers[origin.layer]
        matrix = next(each for each in facts.matrices if each.name == origin.matrix)
        shape = (origin.rows, matrix.width)
        one = shape[::-1] if origin.transposed else shape
        self.name, self.dtype = origin.name, header.torch_dtype
        self.shape = one if origin.expert is not None else (facts.experts, *one)
        read = expansion.file.layer_bytes(origin.layer) / facts.experts
        share = origin.rows * matrix.width / sum(each.rows * each.width for each in facts.matrices)
        experts = 1 if origin.expert is not None else facts.experts
        self.nbytes = int(read * share * experts)

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        if self._origin.expert is not None:
            return self._read(self._origin.expert).clone(memory_format=torch.contiguous_format)
        whole = torch.empty(self.shape, dtype=self.dtype)
        for expert, out in enumerate(whole):
            out.copy_(self._read(expert))
        return whole

    def _read(self, expert: int) -> Tensor:
        layer, first = self._origin.layer, self._origin.first
        rows = self._expansion.rows(layer, expert)[self._origin.matrix]
        part = rows[first : first + self._origin.rows]
        return part.T if self._origin.transposed else part


class _Verified:
    """A plain tensor whose checksum is known."""

    def __init__(self, file: CodedFile, stored: StoredTensor, kept: int) -> None:
        self._file, self._stored, self._kept = file, stored, kept
        self.name, self.dtype, self.shape = stored.name, stored.dtype, stored.shape
        self.nbytes = stored.nbytes

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        tensor = self._stored.read()
        if checksum(tensor) != self._kept:
            raise self._file.broken(f"{self.name} is damaged")
        return tensor


def _is_whole(base: PackedWeight | None, refinement: Tensor, kept: int) -> bool:
    try:
        return stream_checksum(base, refinement) == kept
    except SpecterError:  # not even a refinement
        return False


def _expected(
    header: CodedHeader, layer: int, facts: CodedLayerFacts
) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, type and shape of a layer's tensors, but for the refinements, whose sizes are told."""
    code = header.coding.draft_code
    assert code is not None
    for name in ("sizes", "checksums"):
        yield f"{PREFIX}{layer}.{name}", torch.int64, (facts.experts, len(facts.matrices))
    for matrix in facts.matrices:
        stored = code_bytes.row_bytes(matrix.width, code.group_size, code.bits)
        groups = math.ceil(matrix.width / code.group_size)
        name = f"{PREFIX}{layer}.{matrix.name}"
        yield f"{name}.codes", torch.uint8, (facts.experts, matrix.rows, stored)
        yield f"{name}.scales", torch.float16, (facts.experts, matrix.rows, groups)


def _facts_of(layer: ExpertLayer) -> tuple[object, ...]:
    weights = expert_weights(layer.experts)
    shapes = [(name, tuple(weight.shape[1:])) for name, weight in weights.items()]
    return layer.name, layer.num_experts, shapes


def _shapes(facts: CodedLayerFacts) -> tuple[object, ...]:
    return facts.name, facts.experts, [(each.name, each.shape) for each in facts.matrices]
