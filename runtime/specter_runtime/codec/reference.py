"""The definition of coded experts, in plain torch and Python: what the native code must equal.

Names of the stream's parts are in `specter_cuda`'s `src/expert_code.h`. Nothing here is fast.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class Ranges:
    """What the code of every weight leaves open: int64 [weights] each.

    low, high: the patterns of the magnitudes that have this code; down: the refinement counts from
    `high`, in the bin that reaches to zero; elsewhere it counts from `low`.
    """

    low: Ints
    high: Ints
    down: Bits

    def refinement(self, magnitudes: Ints) -> Ints:
        """Where in its range each magnitude lies, from 0."""
        return np.where(self.down, self.high - magnitudes, magnitudes - self.low)

    def magnitudes(self, refinement: Ints) -> Ints:
        """Undo `refinement`."""
        return np.where(self.down, self.high - refinement, self.low + refinement)


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
    finite = torch.arange(form.infinity).to(form.integer).view(form.dtype).to(torch.float32)
    edges = torch.tensor(base_code.edges_for(bits), dtype=torch.float32) / base_code.EDGE_UNIT
    inner = torch.searchsorted(finite, scales.to(torch.float32).unsqueeze(-1) * edges)
    ends = torch.zeros(*scales.shape, 1, dtype=torch.int64)
    return torch.cat((ends, inner, ends + count), -1).numpy()


def ranges(codes: Tensor, scales: Tensor, bits: int, group_size: int, form: Format) -> Ranges:
    """The ranges that `codes` [rows, in] leave open."""
    starts = _of_weights(bin_starts(scales, bits, form), codes.shape[-1], group_size)
    bins = codes.flatten().numpy().astype(np.int64) & (2 ** (bits - 1) - 1)
    places = np.arange(len(bins))
    return Ranges(starts[places, bins], starts[places, bins + 1] - 1, bins == 0)


def encode_refinement(weight: Tensor, codes: Tensor, scales: Tensor, header: Header) -> bytes:
    """The refinement of `weight` [rows, in]; `header` gives everything but the size."""
    form, low_bits = format_of(weight), header.low_bits
    magnitudes = patterns(weight) & (2**form.magnitude_bits - 1)
    known = ranges(codes, scales, header.base_bits, header.group_size, form)
    refinement = known.refinement(magnitudes)
    levels = np.minimum(refinement >> low_bits, header.levels)
    in_plane = np.where(levels == header.levels, magnitudes, refinement) & (2**low_bits - 1)
    is_open = (known.high - known.low) >> low_bits > 0
    high_bits = form.magnitude_bits - low_bits
    stream, owners = _told(levels, is_open, magnitudes >> low_bits, high_bits, header.levels)
    chunks = np.arange(0, len(levels), BLOCK) // CHUNK
    positions = np.append(np.searchsorted(owners, chunks), len(stream))
    return _assembled(header, positions, _bits_of(_padded(in_plane, CHUNK), low_bits), stream)


def _told(levels: Ints, is_open: Bits, high: Ints, high_bits: int, most: int) -> tuple[Bits, Ints]:
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


def _assembled(header: Header, positions: Ints, plane: Bits, stream: Bits) -> bytes:
    parts = positions.astype("<u4").tobytes()
    parts += np.packbits(plane, bitorder="little").tobytes()
    parts += np.packbits(stream, bitorder="little").tobytes() + bytes(PADDING_BYTES)
    parts += bytes(-(HEADER_BYTES + len(parts)) % 8)
    sized = Header(**(vars(header) | {"size_bytes": HEADER_BYTES + len(parts)}))
    return sized.pack() + parts


def expand(refinement: bytes, header: Header, codes: Tensor, scales: Tensor) -> Tensor:
    """The weights [rows, in] of a refinement that is whole and of this base."""
    form = FORMATS[header.weight_type]
    known = ranges(codes, scales, header.base_bits, header.group_size, form)
    weights, low_bits = header.rows * header.width, header.low_bits
    chunks, blocks = -(-weights // CHUNK), -(-weights // BLOCK)
    begin = HEADER_BYTES + 4 * (blocks + 1)
    end = begin + chunks * CHUNK * low_bits // 8
    in_plane = _numbers(_unpacked(refinement[begin:end]), low_bits)[:weights]
    stream = _unpacked(refinement[end:])
    is_open = (known.high - known.low) >> low_bits > 0
    levels = np.zeros(weights, np.int64)
    high = np.full(weights, -1, np.int64)
    position = 0
    for start in range(0, weights, CHUNK):
        part = slice(start, start + CHUNK)
        position = _read_chunk(
            stream,
            position,
            is_open[part],
            levels[part],
            high[part],
            form.magnitude_bits - low_bits,
            header.levels,
        )
    magnitudes = known.magnitudes(levels << low_bits | in_plane)
    magnitudes = np.where(high >= 0, high << low_bits | in_plane, magnitudes)
    signs = codes.flatten().numpy().astype(np.int64) >> (header.base_bits - 1)
    whole = torch.from_numpy(magnitudes | signs << form.magnitude_bits).to(form.integer)
    return whole.view(form.dtype).view(header.rows, header.width)


def _read_chunk(
    stream: Bits, position: int, is_open: Bits, levels: Ints, high: Ints, high_bits: int, most: int
) -> int:
    """Fill in the levels of a chunk, and the high bits of its escapes; the position behind it."""
    reached = np.flatnonzero(is_open)
    for _ in range(most):
        reached, position = (
            reached[stream[position : position + len(reached)]],
            position + len(reached),
        )
        levels[reached] += 1
    for place in reached:
        high[place] = _numbers(stream[position : position + high_bits], high_bits)[0]
        position += high_bits
    return position


def _of_weights(per_group: Ints, width: int, group_size: int) -> Ints:
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
