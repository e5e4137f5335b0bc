"""What coding a checkpoint's experts would take and save, told before it is done.

Matrices are read, coded and dropped one by one: memory holds one matrix, whatever the model's size.
Bits are those of all weights. Overflow and entropy are measured on a sample of each layer's
matrices, about a million weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from specter_runtime.checkpoint import DTYPES, find_folder, read_folder
from specter_runtime.codec import Coded, Coding, encode
from specter_runtime.codec.coding import FORMATS, format_of
from specter_runtime.codec.reference import bin_starts
from specter_runtime.codec.stream import Kind, read_header
from specter_runtime.experts import ExpertLayer, expert_weights, find_layers
from specter_runtime.model_loading import Progress, build_skeleton
from specter_runtime.stored_experts import ExpertTensor, expert_tensors
from specter_traces.errors import SpecterError, UsageError

SAMPLE_WEIGHTS = 1 << 20
"""Weights of one matrix name in one layer after which nothing more is measured."""


@dataclass(frozen=True)
class MatrixCoding:
    """Matrices of one name, of one layer or of several, in coded form.

    Attributes:
        layer: the MoE layer, None for several.
        weights, plain_bytes: how many there are, and their bytes in the exact type.
        base_bytes, refinement_bytes: what they take when coded.
        overflow: share of weights that are told in more than the fixed-width plane.
        escapes: share of weights that are told in full.
        limit_bits: bits a weight that no code of these refinements can go below: the entropy of a
            weight's place in its bin, bin by bin: sum over bins j of p(j) H(r | j), where r counts
            patterns from the bin's edge (at a group's own scale) and p and H are the sample's
            frequencies. A coder that also looked at a weight's neighbours could do better.
        uncoded: matrices that do not gain and stay plain.
    """

    layer: int | None
    matrix: str
    weights: int
    plain_bytes: int
    base_bytes: int
    refinement_bytes: int
    overflow: float
    escapes: float
    limit_bits: float
    uncoded: int

    @property
    def base_bits(self) -> float:
        """Bits a weight of codes and scales."""
        return 8 * self.base_bytes / self.weights

    @property
    def refinement_bits(self) -> float:
        """Bits a weight of the refinement, headers and block positions included."""
        return 8 * self.refinement_bytes / self.weights

    @property
    def above_limit_bits(self) -> float:
        """How far the refinement is above the limit; a matrix that stays plain is as well."""
        return self.refinement_bits - self.limit_bits


@dataclass(frozen=True)
class CodingReport:
    """A checkpoint's experts in coded form.

    `matrices`: by layer and name; `stored_bytes`: of the experts in the files as they are;
    `other_bytes`: of everything else in them.
    """

    name: str
    coding: Coding
    dtype: torch.dtype
    layers: int
    experts: tuple[int, ...]
    matrices: tuple[MatrixCoding, ...]
    stored_bytes: int
    other_bytes: int

    def by_matrix(self) -> list[MatrixCoding]:
        """One line for each name, over all layers."""
        named = sorted(self.matrices, key=lambda each: each.matrix)
        return [combine(list(each)) for _, each in groupby(named, lambda each: each.matrix)]

    @property
    def total(self) -> MatrixCoding:
        """Everything in one line."""
        return combine(list(self.matrices))

    def slots_share(self, resident: float) -> float:
        """Share of experts that are resident in the memory of a share of plain ones.

        The base is paid from the same memory. At most 1; 0 where the base does not fit.
        """
        left = resident * self.total.plain_bytes - self.total.base_bytes
        return min(1.0, max(0.0, left / self.total.refinement_bytes))

    def drafted_share(self, resident: float) -> float:
        """The same for plain experts beside a draft that is as large as the base."""
        return max(0.0, resident - self.total.base_bytes / self.total.plain_bytes)


def combine(parts: list[MatrixCoding]) -> MatrixCoding:
    """Several lines as one: sums of bytes, means over weights."""
    weights = sum(part.weights for part in parts)

    def mean(of: Callable[[MatrixCoding], float]) -> float:
        return sum(of(part) * part.weights for part in parts) / weights

    names = {part.matrix for part in parts}
    return MatrixCoding(
        layer=parts[0].layer if len({part.layer for part in parts}) == 1 else None,
        matrix=names.pop() if len(names) == 1 else "all",
        weights=weights,
        plain_bytes=sum(part.plain_bytes for part in parts),
        base_bytes=sum(part.base_bytes for part in parts),
        refinement_bytes=sum(part.refinement_bytes for part in parts),
        overflow=mean(lambda part: part.overflow),
        escapes=mean(lambda part: part.escapes),
        limit_bits=mean(lambda part: part.limit_bits),
        uncoded=sum(part.uncoded for part in parts),
    )


def coding_report(
    model: str, coding: Coding, dtype: str = "auto", progress: Progress | None = None
) -> CodingReport:
    """Code every expert of `model` (as `open_checkpoint` finds it) and drop the result.

    `coding` has a base of 2, 3 or 4 bits. UsageError for a model that cannot be read or whose
    experts cannot be coded; SpecterError where none are found.
    """
    folder = find_folder(model)
    stored, sources, method = read_folder(folder)
    refuse_packed(folder, method, "mxfp4")
    layers = find_layers(build_skeleton(folder, sources))
    tensors = expert_tensors(sources, layers)
    if not tensors:
        raise SpecterError(f"{folder} has no routed experts that are known how to be read")
    exact = exact_dtype(folder, (tensor.source.dtype for tensor in tensors), dtype)
    experts_bytes = sum(tensor.source.nbytes for tensor in tensors)
    matrices = _all_matrices(tensors, layers, coding, exact, progress)
    return CodingReport(
        folder.name if Path(model).exists() else model,
        coding,
        exact,
        len(layers),
        tuple(layer.num_experts for layer in layers),
        tuple(matrices),
        experts_bytes,
        sum(tensor.nbytes for tensor in stored.values()) - experts_bytes,
    )


def refuse_packed(folder: Path, method: str, *refused: str) -> None:
    """UsageError for experts that are packed tighter than they could be coded."""
    if method in refused:
        raise UsageError(
            f"the experts of {folder} are stored as {method.upper()}: coding the numbers they "
            "stand for would take more bytes than they do now"
        )


def exact_dtype(folder: Path, stored: Iterable[torch.dtype], dtype: str) -> torch.dtype:
    """The type whose bits are kept: the stored one unless `dtype` says another.

    UsageError for a type that cannot be coded.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown number type {dtype!r}: choose one of {', '.join(DTYPES)}")
    types = sorted(set(stored), key=str)
    chosen = DTYPES[dtype] or types[0]
    if chosen not in [form.dtype for form in FORMATS] or (dtype == "auto" and len(types) > 1):
        names = " and ".join(str(each).removeprefix("torch.") for each in types)
        raise UsageError(
            f"the experts of {folder} are {names}; what can be coded is bfloat16 or float16: "
            "choose one with --dtype"
        )
    return chosen


def _all_matrices(
    tensors: list[ExpertTensor],
    layers: tuple[ExpertLayer, ...],
    coding: Coding,
    dtype: torch.dtype,
    progress: Progress | None,
) -> Iterator[MatrixCoding]:
    done, total = 0, sum(tensor.source.nbytes for tensor in tensors)
    ordered = sorted(tensors, key=lambda each: (each.layer, each.matrix, each.expert or 0))
    for (layer, matrix), group in groupby(ordered, lambda each: (each.layer, each.matrix)):
        tally = _Tally(coding)
        for tensor in group:
            for expert in tensor.experts():
                tally.add(as_rows(layers[layer], tensor, tensor.read(expert)).to(dtype))
            done += tensor.source.nbytes
            if progress is not None:
                progress(done, total)
        yield tally.told(layer, matrix.removesuffix(".weight"))


def as_rows(layer: ExpertLayer, tensor: ExpertTensor, weight: Tensor) -> Tensor:
    """A stored matrix as rows of inputs [out, in]: how a layer fused in the file is transposed."""
    known = expert_weights(layer.experts).get(tensor.matrix)
    if tensor.expert is not None or known is None:
        return weight
    return layer.as_rows(weight if weight.shape == known.shape[1:] else weight.T)


@dataclass
class _Tally:
    """Counts over matrices that are alike."""

    coding: Coding
    weights: int = 0
    plain_bytes: int = 0
    base_bytes: int = 0
    refinement_bytes: int = 0
    uncoded: int = 0
    sampled: int = 0
    overflow: int = 0
    escapes: int = 0
    counts: Tensor | None = None  # of every bin and place in it

    def add(self, rows: Tensor) -> None:
        """Code one matrix."""
        rows = rows.contiguous()
        coded = encode(rows, self.coding)
        self.weights += rows.numel()
        self.plain_bytes += rows.nbytes
        self.base_bytes += coded.base.nbytes if coded.base else 0
        self.refinement_bytes += len(coded.refinement)
        self.uncoded += coded.plain
        if self.sampled < SAMPLE_WEIGHTS:
            self._measure(rows, coded)

    def _measure(self, rows: Tensor, coded: Coded) -> None:
        """Where in their bins the weights lie. A matrix that stays plain has no header to tell."""
        header, form = read_header(coded.refinement), format_of(rows)
        assert coded.base is not None
        starts = bin_starts(coded.base.scales, coded.base.code.bits, form)
        bins, refinement = _places(rows, torch.from_numpy(starts), coded.base.code.group_size)
        self.sampled += rows.numel()
        if header.kind is Kind.LEVELS:
            levels = refinement >> header.low_bits
            self.overflow += int((levels > 0).sum())
            self.escapes += int((levels >= header.levels).sum())
        every = 2 ** (coded.base.code.bits - 1) << form.magnitude_bits
        found = torch.bincount(bins << form.magnitude_bits | refinement, minlength=every)
        found = found.view(-1, 2**form.magnitude_bits)
        self.counts = found if self.counts is None else self.counts + found

    def told(self, layer: int, matrix: str) -> MatrixCoding:
        """The line of all that was added."""
        assert self.counts is not None
        bits = sum(_information_bits(count) for count in self.counts)
        return MatrixCoding(
            layer,
            matrix,
            self.weights,
            self.plain_bytes,
            self.base_bytes,
            self.refinement_bytes,
            self.overflow / self.sampled,
            self.escapes / self.sampled,
            bits / self.sampled,
            self.uncoded,
        )


def _places(rows: Tensor, starts: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Each weight's bin and its place in it: int64 [weights] each.

    starts: [rows, groups, bins + 1]. In the bin that reaches to zero, places count from the top.
    """
    form = format_of(rows)
    width = rows.shape[1]
    patterns = rows.view(form.integer).to(torch.int64) & (2**form.magnitude_bits - 1)
    of_weight = starts.repeat_interleave(group_size, 1)[:, :width]
    bins = (patterns.unsqueeze(-1) >= of_weight[..., 1:-1]).sum(-1)
    low = of_weight.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
    high = of_weight.gather(-1, bins.unsqueeze(-1) + 1).squeeze(-1) - 1
    places = torch.where(bins == 0, high - patterns, patterns - low)
    return bins.flatten(), places.flatten()


def _information_bits(counts: Tensor) -> float:
    """Bits of as many draws as were counted, at their own frequencies."""
    present = counts[counts > 0].to(torch.float64)
    if not len(present):
        return 0.0
    return float((present * (math.log2(float(present.sum())) - present.log2())).sum())
