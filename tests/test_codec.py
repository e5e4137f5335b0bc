"""Coded experts return every weight to the bit, from the very base that a draft computes with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter_cuda import CodedMatrix, ExpandOutcome, compress_expert, expand_expert
from specter_runtime.codec import (
    BaseName,
    Coding,
    encode,
    expand_into,
    reference,
    reference_exponents,
    stream_checksum,
)
from specter_runtime.codec.coding import FORMATS, Format, format_of, low_bits, most_levels
from specter_runtime.codec.stream import Header, Kind, read_header
from specter_runtime.quantizer import base_code, code_bytes, parse
from specter_runtime.quantizer.packed import PackedWeight

BASES: tuple[BaseName | None, ...] = ("base2", "base3", "base4", "int8", None)
BITS = {"base2": 2, "base3": 3, "base4": 4, "int8": 8, None: 0}
GROUP_SIZES = (32, 64, 128)
SHAPES = ((1, 1), (3, 64), (2, 128), (5, 63), (1, 200), (7, 33), (2, 96), (17, 65), (9, 256))
KINDS = (
    "gaussian",
    "heavy",
    "constant",
    "zero",
    "subnormal",
    "sparse",
    "not finite",
    "any pattern",
    "tiny scale",
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here: threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def patterns(weight: Tensor) -> Tensor:
    return weight.contiguous().view(format_of(weight).integer)


def random_weight(shape: tuple[int, int], kind: str, form: Format, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind in ("any pattern", "subnormal"):
        above = {"any pattern": form.magnitude_bits, "subnormal": form.mantissa_bits}[kind]
        magnitude = torch.randint(0, 2**above, shape, generator=generator)
        sign = torch.randint(0, 2, shape, generator=generator) << form.magnitude_bits
        return (magnitude | sign).to(form.integer).view(form.dtype)
    normal = torch.randn(shape, generator=generator) * 0.05
    if kind == "heavy":
        normal = normal / torch.rand(shape, generator=generator).clamp(min=1e-4)
    if kind == "constant":
        normal = torch.full(shape, -0.0371)
    if kind == "zero":
        normal = torch.where(normal < 0, -0.0, 0.0)
    if kind == "sparse":
        normal[torch.rand(shape, generator=generator) < 0.2] = 0.0
    if kind == "tiny scale":
        normal = normal * 1e-30
    if kind == "not finite":
        chosen = torch.rand(shape, generator=generator)
        normal[chosen < 0.05] = math.nan
        normal[chosen > 0.95] = -math.inf
    return (
        normal.clamp(-400, 400).to(form.dtype)
        if form.magnitude_bits == 7
        else normal.to(form.dtype)
    )


def matrix_of(weight: Tensor, bits: int, group_size: int) -> CodedMatrix:
    edges = tuple(edge / base_code.EDGE_UNIT for edge in base_code.EDGES.get(bits, ()))
    native = format_of(weight).native
    return CodedMatrix(weight.shape[0], weight.shape[1], native, bits, group_size, edges)


class Base(NamedTuple):
    """Codes, one a byte and packed, and scales; empty without a base."""

    places: Tensor
    packed: Tensor
    scales: Tensor


def reference_base(weight: Tensor, bits: int, group_size: int) -> Base:
    if bits == 0:
        return Base(*(torch.empty(0, dtype=torch.uint8) for _ in range(3)))
    if bits == 8:
        finite = weight.to(torch.float32).nan_to_num(0, 0, 0)
        draft = PackedWeight.pack(finite, parse("int8", group_size))
        return Base(draft.codes, draft.codes, draft.scales)
    places, scales = reference.encode_base(weight, bits, group_size)
    return Base(places, code_bytes.pack(places, bits, group_size), scales)


def compressed(weight: Tensor, base: Base, bits: int, group_size: int, portable: bool) -> Tensor:
    """The native refinement, of a base that is written again and must be the same."""
    form = format_of(weight)
    codes, scales = base.packed.clone(), base.scales.clone()
    if bits in base_code.EDGES:
        codes.fill_(0xA5)
        scales.fill_(7.0)
    room = torch.full((weight.numel() * 8 + 4096,), 0xA5, dtype=torch.uint8)
    size = compress_expert(
        matrix_of(weight, bits, group_size),
        weight.data_ptr(),
        low_bits(form, bits),
        most_levels(bits),
        codes.data_ptr(),
        scales.data_ptr(),
        room.data_ptr(),
        len(room),
        portable=portable,
    )
    assert torch.equal(codes, base.packed)
    assert torch.equal(scales.view(torch.uint8), base.scales.view(torch.uint8))
    assert (room[size + 256 :] == 0xA5).all()
    return room[:size].clone()


def check_against_reference(weight: Tensor, bits: int, group_size: int, portable: bool) -> None:
    """Native base, stream and expansion are the reference's, byte for byte."""
    base = reference_base(weight, bits, group_size)
    found = compressed(weight, base, bits, group_size, portable)
    header, stream = read_header(found), bytes(found.numpy())
    if bits:
        expected = reference.encode_refinement(weight, base.places, base.scales, header)
        again = reference.expand(expected, header, base.places, base.scales)
    else:
        expected = reference_exponents.encode(weight, header)
        again = reference_exponents.expand(expected, header)
    assert stream == expected
    assert torch.equal(patterns(again), patterns(weight))
    out = torch.empty_like(weight)
    outcome = expand_expert(
        matrix_of(weight, bits, group_size),
        base.packed.data_ptr(),
        base.scales.data_ptr(),
        found.data_ptr(),
        len(found),
        out.data_ptr(),
        portable=portable,
    )
    assert outcome is ExpandOutcome.FINE
    assert torch.equal(patterns(out), patterns(weight))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.native)
@pytest.mark.parametrize("base", BASES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.sampled_from(SHAPES),
    kind=st.sampled_from(KINDS),
    group_size=st.sampled_from(GROUP_SIZES),
    seed=st.integers(0, 2**32),
    portable=st.booleans(),
)
def test_random_weights_are_coded_as_the_reference_does(
    form: Format,
    base: BaseName | None,
    shape: tuple[int, int],
    kind: str,
    group_size: int,
    seed: int,
    portable: bool,
) -> None:
    weight = random_weight(shape, kind, form, seed)
    check_against_reference(weight, BITS[base], group_size, portable)
    coded = encode(weight, Coding(base, group_size))
    assert (coded.base is None) == (base is None)
    assert coded.checksum == stream_checksum(coded.base, coded.refinement)
    slot = torch.cat((coded.refinement, torch.full((100,), 0xFF, dtype=torch.uint8)))
    out = torch.empty_like(weight)
    expand_into(coded.base, slot, out)
    assert torch.equal(patterns(out), patterns(weight))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.native)
@pytest.mark.parametrize("bits", (2, 3, 4))
def test_every_pattern_round_trips_in_every_bin(form: Format, bits: int) -> None:
    """Groups of 32 neighbouring patterns, each with the scales that bring it into every bin.

    Magnitudes that no FP16 scale brings there get the nearest scale, zero included.
    """
    count = 2 ** (form.magnitude_bits + 1)
    every = torch.arange(count).to(form.integer).view(form.dtype).view(-1, 32)
    typical = every.to(torch.float32).abs().nan_to_num(448).amax(-1)
    middles = base_code.gaussian_means(base_code.edges_for(bits))
    scales = (typical[:, None] / middles).clamp(max=65504.0).to(torch.float16)
    weight = every.unsqueeze(1).expand(-1, len(middles), -1).reshape(-1, 64).contiguous()
    check_with_scales(weight, scales.view(-1, 2), bits)


def check_with_scales(weight: Tensor, scales: Tensor, bits: int) -> None:
    """Round trip of weights under scales that are not theirs, in groups of 32."""
    form, (rows, width) = format_of(weight), weight.shape
    starts = reference.bin_starts(scales, bits, form).repeat(32, 1).reshape(weight.numel(), -1)
    every = reference.patterns(weight)
    magnitudes, signs = every % 2**form.magnitude_bits, every >> form.magnitude_bits
    bins = (magnitudes[:, None] >= starts[:, 1:-1]).sum(1)
    assert len(set(bins)) == 2 ** (bits - 1)
    places = torch.from_numpy((bins | signs << (bits - 1)).astype("uint8")).view(rows, width)
    kind = FORMATS.index(form)
    header = Header(
        Kind.LEVELS, bits, kind, form.mantissa_bits, most_levels(bits), 32, rows, width, 0
    )
    refinement = reference.encode_refinement(weight, places, scales, header)
    stream = torch.frombuffer(bytearray(refinement), dtype=torch.uint8)
    codes, matrix = code_bytes.pack(places, bits, 32), matrix_of(weight, bits, 32)
    base = (codes.data_ptr(), scales.data_ptr())
    for portable in (False, True):
        out = torch.empty_like(weight)
        found = (stream.data_ptr(), len(stream), out.data_ptr())
        assert expand_expert(matrix, *base, *found, portable=portable) is ExpandOutcome.FINE
        assert torch.equal(patterns(out), patterns(weight))


@pytest.mark.parametrize("form", FORMATS[:2], ids=lambda form: form.native)
@pytest.mark.parametrize("bits", (0, 8))
@pytest.mark.parametrize("portable", (False, True))
def test_every_pattern_round_trips_without_a_base_or_after_8_bits(
    form: Format, bits: int, portable: bool
) -> None:
    every = torch.arange(2**16).to(form.integer).view(form.dtype)
    shuffled = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(3))]
    for weight in (every.view(-1, 128), shuffled.view(-1, 128)):
        base = reference_base(weight, bits, 64)
        found = compressed(weight, base, bits, 64, portable)
        out = torch.empty_like(weight)
        outcome = expand_expert(
            matrix_of(weight, bits, 64),
            base.packed.data_ptr(),
            base.scales.data_ptr(),
            found.data_ptr(),
            len(found),
            out.data_ptr(),
            portable=portable,
        )
        assert outcome is ExpandOutcome.FINE
        assert torch.equal(patterns(out), patterns(weight))


@pytest.mark.parametrize("base", BASES[:4])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_the_base_is_the_draft(base: BaseName, group_size: int) -> None:
    weight = random_weight((48, 320), "heavy", FORMATS[0], 5)
    coding = Coding(base, group_size)
    assert coding.draft_code is not None
    found, expected = encode(weight, coding).base, PackedWeight.pack(weight, coding.draft_code)
    assert found is not None
    assert found.code == expected.code and found.table == expected.table
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    draft = coding.draft_code.draft_weight(weight)
    assert torch.equal(patterns(found.decode(weight.dtype)), patterns(draft))
