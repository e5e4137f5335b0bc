"""The definition of coded experts, in plain torch and Python: what the native code must equal.

Names of the stream's parts are in `specter_cuda`'s `src/expert_code.h`. Nothing here is fast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specter_runtime.codec.coding import FORMATS, Format, format_of
from specter_runtime.codec.stream import HEADER_BYTES, Header
from specter_runtime.quantizer import base_code
from specter_runtime.quantizer import groups as grouping

CHUNK = 64
"""Weights whose levels are told together."""
BLOCK = 1024
"""Weights with a written place in the bit stream."""
PADDING_BYTES = 16

Ints = NDArray[np.int64]
Bits = NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.float32)
_BYTE_BITS = 8


@dataclass(frozen=True)
class Ranges:
    """What the code of every weight leaves open: [weights] each.

    low, high: the patterns of the magnitudes that have this code; signs: known from the code;
    down: the refinement counts from `high`, where a range reaches to zero; elsewhere it counts from
    `low`; signless: the sign is not known and is added to the doubled refinement.
    """

    low: Ints
    high: Ints
    signs: Ints
    down: Bits
    signless: Bits

    def refinement(self, magnitudes: Ints, signs: Ints) -> Ints:
        """Where in its range each magnitude lies, from 0; -1 for one that lies outside."""
        inside = (magnitudes >= self.low) & (magnitudes <= self.high)
        inside &= self.signless | (signs == self.signs)
        place = np.where(self.down, self.high - magnitudes, magnitudes - self.low)
        return np.where(inside, np.where(self.signless, place * 2 + signs, place), -1)

    def patterns(self, refinement: Ints, form: Format) -> Ints:
        """Undo `refinement`: magnitudes and signs."""
        place = np.where(self.signless, refinement >> 1, refinement)
        magnitudes = np.where(self.down, self.high - place, self.low + place)
        signs = np.where(self.signless, refinement & 1, self.signs)
        every: Ints = magnitudes | signs << form.magnitude_bits
        return every

    def is_open(self, low_bits: int) -> Bits:
        """Whether a refinement can be wider than the plane."""
        return ((self.high - self.low) >> low_bits > 0) | self.signless


def patterns(weight: Tensor) -> Ints:
    """The bits of the weights as integers from 0, row by row."""
    form = format_of(weight)
    whole = weight.contiguous().view(form.integer).flatten().to(torch.int64)
    kept: Ints = (whole & (2 ** (form.magnitude_bits + 1) - 1)).numpy()
    return kept


def encode_base(weight: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [rows, in] and scales FP16 [rows, groups] of `weight` [rows, in].

    The codes of `base_code.encode` where that is defined. Weights that are not finite count as zero
    in the scale; their patterns decide about their bin, as everybody's.
    """
    form = format_of(weight)
    rows, width = weight.shape
    finite = weight.to(torch.float32).nan_to_num(0, 0, 0)
    scales = grouping.root_mean_square(grouping.split(finite, group_size), width)
    starts = _of_weights(bin_starts(scales, bits, form), width, group_size)
    every = patterns(weight)
    magnitudes = every & (2**form.magnitude_bits - 1)
    bins = (magnitudes[:, None] >= starts[:, 1:-1]).sum(1)
    codes = bins | (every >> form.magnitude_bits) << (bits - 1)
    return torch.from_numpy(codes.astype(np.uint8)).view(rows, width), scales


def bin_starts(scales: Tensor, bits: int, form: Format) -> Ints:
    """The first magnitude pattern of every bin, and one past the last: [rows, groups, bins + 1].

    A bin starts at the first pattern whose value is at or above its edge times the scale; an edge
    (at most 8 bits) times a scale (11 bits) is exact in FP32.
    """
    count = 2**form.magnitude_bits
    edges = torch.tensor(base_code.edges_for(bits), dtype=torch.float32) / base_code.EDGE_UNIT
    inner = _ceiling(scales.to(torch.float32).unsqueeze(-1) * edges, form)
    ends = np.zeros((*scales.shape, 1), np.int64)
    return np.concatenate((ends, inner, ends + count), -1)


def ranges(codes: Tensor, scales: Tensor, bits: int, group_size: int, form: Format) -> Ranges:
    """The ranges that `codes` [rows, in] of 2 to 4 bits, or the levels of 8 bits, leave open."""
    places = codes.flatten().numpy().astype(np.int64)
    if bits == _BYTE_BITS:
        return _step_ranges(places, scales, group_size, form, codes.shape[-1])
    starts = _of_weights(bin_starts(scales, bits, form), codes.shape[-1], group_size)
    bins, every = places & (2 ** (bits - 1) - 1), np.arange(len(places))
    low, high = starts[every, bins], starts[every, bins + 1] - 1
    return Ranges(low, high, places >> (bits - 1), bins == 0, np.zeros(len(bins), bool))


def _step_ranges(places: Ints, scales: Tensor, group_size: int, form: Format, width: int) -> Ranges:
    """Half a step of the grid around each level, and a pattern more on either side.

    A level is found by a division that is rounded to FP32: at the edge of two levels it may be the
    wrong one. Level 0 has no sign; the levels at the ends have no limit.
    """
    levels = np.where(places > 127, places - 256, places)
    steps = _of_weights(scales.to(torch.float32).unsqueeze(-1).numpy(), width, group_size)[:, 0]
    sizes = np.abs(levels)
    behind = _ceiling(torch.from_numpy((sizes + 0.5).astype(np.float32) * steps), form)
    start = _ceiling(torch.from_numpy((sizes - 0.5).clip(0).astype(np.float32) * steps), form)
    low = np.where(sizes > 0, (start - 1).clip(0), 0)
    high = np.where(sizes >= 127, 2**form.magnitude_bits - 1, behind)
    return Ranges(low, high, (levels < 0).astype(np.int64), sizes == 0, sizes == 0)


def _ceiling(values: Tensor, form: Format) -> Ints:
    """The first magnitude pattern whose value is at or above each of `values`."""
    finite = torch.arange(form.infinity).to(form.integer).view(form.dtype).to(torch.float32)
    first: Ints = torch.searchsorted(finite, values).numpy()
    return first


def encode_refinement(weight: Tensor, codes: Tensor, scales: Tensor, header: Header) -> bytes:
    """The refinement of `weight` [rows, in]; `header` gives everything but the size."""
    form, low_bits = format_of(weight), header.low_bits
    every = patterns(weight)
    known = ranges(codes, scales, header.base_bits, header.group_size, form)
    magnitudes, signs = every % 2**form.magnitude_bits, every >> form.magnitude_bits
    refinement = known.refinement(magnitudes, signs)
    escapes = (refinement < 0) | (refinement >> low_bits >= header.levels)
    levels = np.where(escapes, header.levels, refinement >> low_bits)
    in_plane = np.where(escapes, every, refinement) % 2**low_bits
    high_bits = form.magnitude_bits + 1 - low_bits
    is_open = known.is_open(low_bits)
    bits = told(levels, is_open, every >> low_bits, high_bits, header.levels)
    return assembled(header, b"", in_plane, *bits)


def expand(refinement: bytes, header: Header, codes: Tensor, scales: Tensor) -> Tensor:
    """The weights [rows, in] of a refinement that is whole and of this base."""
    form, low_bits = FORMATS[header.weight_type], header.low_bits
    known = ranges(codes, scales, header.base_bits, header.group_size, form)
    in_plane, stream = read_parts(refinement, header, 0)
    high_bits = form.magnitude_bits + 1 - low_bits
    levels, high = read_stream(stream, known.is_open(low_bits), high_bits, header.levels)
    inside = known.patterns(levels << low_bits | in_plane, form)
    return to_weight(np.where(high >= 0, high << low_bits | in_plane, inside), header)


def to_weight(every: Ints, header: Header) -> Tensor:
    """Undo `patterns`: a weight [rows, in]."""
    form = FORMATS[header.weight_type]
    whole = torch.from_numpy(every).to(form.integer).view(form.dtype)
    return whole.view(header.rows, header.width)


def told(levels: Ints, is_open: Bits, high: Ints, high_bits: int, most: int) -> tuple[Bits, Ints]:
    """The bits of the stream, and the chunk that each belongs to.

    In a chunk come, for each level below `most`, a bit for every open weight that has reached it:
    whether it goes on; then the high bits of the magnitudes of those that reached `most`.
    """
    bits, keys = [], []
    for level in range(most):
        (reached,) = np.nonzero(is_open & (levels >= level))
        bits.append(levels[reached] > level)
        keys.append((reached // CHUNK * (most + 1) + level) * CHUNK + reached % CHUNK)
    (escaped,) = np.nonzero(is_open & (levels == most))
    bits.append(_bits_of(high[escaped], high_bits))
    key = (escaped // CHUNK * (most + 1) + most) * CHUNK + escaped % CHUNK
    keys.append(np.repeat(key, high_bits))
    every = np.concatenate(keys)
    order = np.argsort(every, kind="stable")
    return np.concatenate(bits)[order], every[order] // ((most + 1) * CHUNK)


def assembled(
    header: Header, exponents: bytes, in_plane: Ints, stream: Bits, owners: Ints
) -> bytes:
    """A refinement of its parts; `owners` are the chunks that the bits of `stream` belong to."""
    chunks = np.arange(0, len(in_plane), BLOCK) // CHUNK
    positions = np.append(np.searchsorted(owners, chunks), len(stream))
    parts = positions.astype("<u4").tobytes() + exponents
    plane = _bits_of(_padded(in_plane, CHUNK), header.low_bits)
    parts += np.packbits(plane, bitorder="little").tobytes()
    parts += np.packbits(stream, bitorder="little").tobytes() + bytes(PADDING_BYTES)
    parts += bytes(-(HEADER_BYTES + len(parts)) % 8)
    return replace(header, size_bytes=HEADER_BYTES + len(parts)).pack() + parts


def read_parts(refinement: bytes, header: Header, exponent_bytes: int) -> tuple[Ints, Bits]:
    """The plane of a refinement, [weights], and the bits of its stream."""
    weights = header.rows * header.width
    chunks, blocks = -(-weights // CHUNK), -(-weights // BLOCK)
    begin = HEADER_BYTES + 4 * (blocks + 1) + exponent_bytes
    end = begin + chunks * CHUNK * header.low_bits // 8
    in_plane = _numbers(_unpacked(refinement[begin:end]), header.low_bits)[:weights]
    return in_plane, _unpacked(refinement[end:])


def read_stream(stream: Bits, is_open: Bits, high_bits: int, most: int) -> tuple[Ints, Ints]:
    """Undo `told`: the level of every weight, and what an escape says, -1 for others."""
    levels = np.zeros(len(is_open), np.int64)
    high = np.full(len(is_open), -1, np.int64)
    position = 0
    for start in range(0, len(is_open), CHUNK):
        reached = start + np.flatnonzero(is_open[start : start + CHUNK])
        for _ in range(most):
            told = stream[position : position + len(reached)]
            position += len(reached)
            reached = reached[told]
            levels[reached] += 1
        for place in reached:
            high[place] = _numbers(stream[position : position + high_bits], high_bits)[0]
            position += high_bits
    return levels, high


def _of_weights(per_group: NDArray[Number], width: int, group_size: int) -> NDArray[Number]:
    """Repeat [rows, groups, n] for every weight of its group: [weights, n]."""
    return np.repeat(per_group, group_size, 1)[:, :width].reshape(-1, per_group.shape[-1])


def _padded(values: Ints, multiple: int) -> Ints:
    return np.pad(values, (0, -len(values) % multiple))


def _bits_of(values: Ints, count: int) -> Bits:
    """The lowest `count` bits of each value, the lowest first, one value after another."""
    return (values[:, None] >> np.arange(count) & 1).astype(bool).ravel()


def _numbers(bits: Bits, count: int) -> Ints:
    """Undo `_bits_of`; bits of an incomplete value at the end are dropped."""
    whole = bits[: len(bits) // count * count].reshape(-1, count).astype(np.int64)
    numbers: Ints = (whole << np.arange(count)).sum(1)
    return numbers


def _unpacked(data: bytes) -> Bits:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").astype(bool)
