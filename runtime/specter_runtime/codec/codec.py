"""Encode a weight as base and refinement, verified to the bit, and expand it again."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specter_cuda import CodedMatrix, ExpandOutcome, compress_expert, expand_expert
from specter_runtime.codec.coding import FORMATS, Coding, Format, format_of, low_bits, most_levels
from specter_runtime.codec.stream import HEADER_BYTES, Header, Kind, read_header
from specter_runtime.quantizer import DraftCode, base_code, code_bytes
from specter_runtime.quantizer.packed import PackedWeight
from specter_traces import DraftKind, SpecterError

MOST_SHARE = 15 / 16
"""A refinement that takes more of the weight's bytes than this is not worth expanding."""

_WORK_BYTES = 512
_REASONS = {
    ExpandOutcome.TRUNCATED: "it is cut short",
    ExpandOutcome.FOREIGN: "it belongs to another weight, coding or type",
    ExpandOutcome.CORRUPT: "its bytes are damaged",
}


class Coded(NamedTuple):
    """A weight in coded form.

    base: the draft's weight, None for a coding without one; refinement: uint8, describes itself;
    checksum: of both, see `stream_checksum`; plain: the refinement holds the weight itself, since
    coding did not gain.
    """

    base: PackedWeight | None
    refinement: Tensor
    checksum: int
    plain: bool


def encode(weight: Tensor, coding: Coding) -> Coded:
    """Take `weight` [rows, in] apart: exact for every bit pattern, verified before it returns.

    The base is bit for bit the draft's `PackedWeight`; weights that are not finite, which a draft
    alone refuses, count as zero in a group's scale. Raises SpecterError for a tensor that is not a
    CPU matrix of a type that can be coded.
    """
    weight = _checked(weight)
    base, refinement = _compressed(weight, coding)
    plain = refinement is None
    if refinement is None:
        refinement = _plain(weight)
    _verify(weight, base, refinement)
    return Coded(base, refinement, stream_checksum(base, refinement), plain)


def expand_into(base: PackedWeight | None, refinement: Tensor, out: Tensor) -> None:
    """Write the exact weights into `out` [rows, in], contiguous, on the CPU.

    `refinement` (uint8) may be longer than what was encoded, as a slot is. Raises SpecterError when
    base, refinement and `out` do not belong together or the refinement is visibly damaged (`out` is
    undefined then). Damage that leaves a valid stream is for `stream_checksum` to find.
    """
    header = read_header(refinement)
    kind = _checked_out(header, out)
    if not refinement.is_contiguous() or refinement.device.type != "cpu":
        raise SpecterError("a refinement to expand is contiguous and on the CPU")
    if header.kind is Kind.PLAIN:
        _copy_plain(header, refinement, out)
        return
    _check_base(base, header)
    outcome = expand_expert(
        _matrix(header.base_bits, header.group_size, out, kind),
        base.codes.data_ptr() if base else 0,
        base.scales.data_ptr() if base else 0,
        refinement.data_ptr(),
        len(refinement),
        out.data_ptr(),
    )
    if outcome is not ExpandOutcome.FINE:
        raise SpecterError(f"cannot expand a refinement: {_REASONS[outcome]}; load it again")


def stream_checksum(base: PackedWeight | None, refinement: Tensor) -> int:
    """CRC-32 of a base's codes and scales and of its refinement, without what lies behind it.

    Raises SpecterError for bytes that are no refinement.
    """
    size_bytes = read_header(refinement).size_bytes
    checksum = 0
    if base is not None:
        for part in (base.codes, base.scales):
            checksum = zlib.crc32(_bytes(part), checksum)
    return zlib.crc32(_bytes(refinement[:size_bytes]), checksum)


def _compressed(weight: Tensor, coding: Coding) -> tuple[PackedWeight | None, Tensor | None]:
    """The base, and the refinement if it is worth having."""
    code, kind = coding.draft_code, format_of(weight)
    base = _new_base(weight, code) if code else None
    bits = code.bits if code else 0
    room = torch.empty(weight.nbytes + _WORK_BYTES + weight.numel() // 64, dtype=torch.uint8)
    size_bytes = compress_expert(
        _matrix(bits, coding.group_size, weight, kind),
        weight.data_ptr(),
        low_bits(kind, bits),
        most_levels(bits),
        base.codes.data_ptr() if base else 0,
        base.scales.data_ptr() if base else 0,
        room.data_ptr(),
        len(room),
    )
    gains = 0 < size_bytes <= MOST_SHARE * weight.nbytes
    return base, room[:size_bytes].clone() if gains else None


def _new_base(weight: Tensor, code: DraftCode) -> PackedWeight:
    """The base with room for codes of bins, which the native code writes; or with its levels."""
    if code.kind is DraftKind.SYMMETRIC:
        return PackedWeight.pack(weight.to(torch.float32).nan_to_num(0, 0, 0), code)
    rows, width = weight.shape
    stored = code_bytes.row_bytes(width, code.group_size, code.bits)
    codes = torch.empty(rows, stored, dtype=torch.uint8)
    scales = torch.empty(rows, -(-width // code.group_size), dtype=torch.float16)
    return PackedWeight(code, width, codes, scales, base_table(code.bits))


@lru_cache(maxsize=8)
def base_table(bits: int) -> tuple[float, ...]:
    """What each code of a base stands for in units of the scale, as `PackedWeight.table`."""
    magnitudes = base_code.gaussian_means(base_code.edges_for(bits)).tolist()
    return (*magnitudes, *(-each for each in magnitudes))


def _matrix(bits: int, group_size: int, weight: Tensor, kind: Format) -> CodedMatrix:
    inner = base_code.EDGES.get(bits, ())
    edges = tuple(edge / base_code.EDGE_UNIT for edge in inner)
    return CodedMatrix(weight.shape[0], weight.shape[1], kind.native, bits, group_size, edges)


def _plain(weight: Tensor) -> Tensor:
    """A refinement that holds the weight itself."""
    rows, width = weight.shape
    kind = FORMATS.index(format_of(weight))
    size_bytes = HEADER_BYTES + weight.nbytes
    header = Header(Kind.PLAIN, 0, kind, 0, 0, 0, rows, width, size_bytes)
    start = torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)
    return torch.cat((start, _flat_bytes(weight)))


def _copy_plain(header: Header, refinement: Tensor, out: Tensor) -> None:
    if header.size_bytes != HEADER_BYTES + out.nbytes:
        raise SpecterError(f"damaged refinement: {header.size_bytes} bytes for {tuple(out.shape)}")
    _flat_bytes(out).copy_(refinement[HEADER_BYTES : header.size_bytes])


def _verify(weight: Tensor, base: PackedWeight | None, refinement: Tensor) -> None:
    again = torch.empty_like(weight)
    expand_into(base, refinement, again)
    if not np.array_equal(_flat_bytes(again).numpy(), _flat_bytes(weight).numpy()):
        raise SpecterError("a coded weight did not expand to the same bits: report this as a bug")


def _check_base(base: PackedWeight | None, header: Header) -> None:
    """The native code reads as many codes and scales as the shape says: they must be there."""
    rows, width = header.rows, header.width
    if base is None:
        if header.base_bits:
            raise SpecterError(f"a refinement needs its base of {header.base_bits} bits, got none")
        return
    bits, group_size = base.code.bits, base.code.group_size
    if (base.shape, bits, group_size) != ((rows, width), header.base_bits, header.group_size):
        raise SpecterError(
            f"base and refinement do not belong together: {base.code.name} {base.shape} in groups "
            f"of {group_size}, refinement for {header.base_bits} bits {rows, width} in groups of "
            f"{header.group_size}"
        )
    stored = code_bytes.row_bytes(width, group_size, bits)
    shapes = (rows, stored), (rows, -(-width // group_size))
    types = torch.uint8, torch.float16
    for part, shape, dtype in zip((base.codes, base.scales), shapes, types, strict=True):
        if part.shape != shape or part.dtype is not dtype or not part.is_contiguous():
            raise SpecterError(f"damaged base: {part.dtype} {tuple(part.shape)}, expected {shape}")


def _checked(weight: Tensor) -> Tensor:
    if weight.ndim != 2 or weight.numel() == 0 or weight.device.type != "cpu":
        raise SpecterError(f"a weight to code is a CPU matrix, got {_described(weight)}")
    format_of(weight)
    return weight.detach().contiguous()


def _checked_out(header: Header, out: Tensor) -> Format:
    if out.device.type != "cpu" or not out.is_contiguous():
        raise SpecterError(f"weights expand to a contiguous CPU tensor, got {_described(out)}")
    kind = format_of(out)
    if header.weight_type != FORMATS.index(kind) or out.shape != (header.rows, header.width):
        raise SpecterError(
            f"the refinement holds a weight {header.rows, header.width} of type number "
            f"{header.weight_type}, got room for {_described(out)}"
        )
    return kind


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return _flat_bytes(tensor).numpy().data


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
