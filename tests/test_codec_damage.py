"""A damaged stream is an error or caught by its checksum; it never reads or writes out of bounds.

Out-of-bounds writes are looked for around `out` here, and everything else by building the library
with `-fsanitize=address` and running this file once, by hand.
"""

from __future__ import annotations

import ctypes
import random
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from specter_cuda import CodedMatrix, ExpandOutcome, compress_expert, expand_expert
from specter_runtime.codec import BaseName, Coded, Coding, encode, expand_into, stream_checksum
from specter_runtime.codec import codec as codec
from specter_runtime.codec.stream import HEADER_BYTES
from specter_runtime.quantizer import base_code
from specter_traces import SpecterError

GUARD = 256
SHAPES = ((24, 256), (11, 93))
BASES: tuple[BaseName | None, ...] = ("base2", "base3", "base4", "int8", None)


def coded_weight(
    shape: tuple[int, int] = SHAPES[0], base: BaseName | None = "base3", seed: int = 0
) -> tuple[Tensor, Coded]:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 0.03).bfloat16()
    weight[0, :40] = 0.0  # escapes
    return weight, encode(weight, Coding(base, 32))


def expanded(coded: Coded, stream: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """What a stream expands to, None for an error; the surroundings of `out` must stay as they are.

    The stream ends where its memory does.
    """
    size = shape[0] * shape[1]
    room = torch.full((size + 2 * GUARD,), -1.5, dtype=torch.bfloat16)
    out = room[GUARD : GUARD + size].view(shape)
    try:
        expand_into(coded.base, stream.clone(), out)
    except SpecterError:
        return None
    finally:
        assert (room[:GUARD] == -1.5).all() and (room[GUARD + size :] == -1.5).all()
    return out


def checked(coded: Coded, stream: Tensor) -> bool:
    """Whether the checksum holds."""
    try:
        return stream_checksum(coded.base, stream) == coded.checksum
    except SpecterError:
        return False


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_every_flipped_bit_is_noticed(shape: tuple[int, int], base: BaseName | None) -> None:
    """By the expansion or by the checksum: every byte of what leads the stream, and others."""
    weight, coded = coded_weight(shape, base)
    generator = random.Random(1)
    errors = 0
    for place in (*range(120), *range(120, len(coded.refinement), 3)):
        stream = coded.refinement.clone()
        stream[place] ^= 1 << generator.randrange(8)
        found = expanded(coded, stream, shape)
        errors += found is None
        assert found is None or not checked(coded, stream)
    assert errors >= HEADER_BYTES - 5  # 5 bytes of the header are spare
    assert torch.equal(expanded(coded, coded.refinement, shape), weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("base", BASES)
def test_bursts_of_damage_are_harmless(base: BaseName | None) -> None:
    _, coded = coded_weight(base=base)
    generator = random.Random(2)
    for _ in range(200):
        stream = coded.refinement.clone()
        at = generator.randrange(len(stream))
        noise = [generator.randrange(256) for _ in range(generator.randrange(1, 200))]
        noise = noise[: len(stream) - at]
        stream[at : at + len(noise)] = torch.tensor(noise, dtype=torch.uint8)
        if not torch.equal(stream, coded.refinement):
            assert expanded(coded, stream, SHAPES[0]) is None or not checked(coded, stream)


def test_a_damaged_base_is_noticed() -> None:
    _, coded = coded_weight()
    assert coded.base is not None
    for part in (coded.base.codes, coded.base.scales.view(torch.int16)):
        for place in range(0, part.numel(), 7):
            part.view(-1)[place] ^= 0x55
            expanded(coded, coded.refinement, SHAPES[0])
            assert not checked(coded, coded.refinement)
            part.view(-1)[place] ^= 0x55
    assert checked(coded, coded.refinement)


@pytest.mark.parametrize("base", BASES)
def test_every_length_but_its_own_is_refused(base: BaseName | None) -> None:
    _, coded = coded_weight(base=base)
    for length in range(0, len(coded.refinement), 3):
        assert expanded(coded, coded.refinement[:length], SHAPES[0]) is None
        assert not checked(coded, coded.refinement[:length])


@pytest.mark.parametrize("place, form", ((8, "B"), (7, "B"), (10, "H"), (12, "I"), (16, "I")))
def test_extreme_numbers_in_the_header_are_harmless(place: int, form: str) -> None:
    _, coded = coded_weight()
    most = 256 ** struct.calcsize(form) - 1
    for value in (0, 1, 11, 16, 255, most):
        stream = coded.refinement.clone()
        number = struct.pack("<" + form, value)
        if bytes(stream[place : place + len(number)].tolist()) == number:
            continue
        stream[place : place + len(number)] = torch.tensor(list(number), dtype=torch.uint8)
        assert expanded(coded, stream, SHAPES[0]) is None or not checked(coded, stream)


def test_block_positions_far_away_are_refused() -> None:
    _, coded = coded_weight()
    blocks = 24 * 256 // 1024
    for block in range(blocks + 1):
        for value in (1, 2**20, 2**32 - 1):
            stream = coded.refinement.clone()
            at = HEADER_BYTES + 4 * block
            stream[at : at + 4] = torch.tensor(list(struct.pack("<I", value)), dtype=torch.uint8)
            assert expanded(coded, stream, SHAPES[0]) is None


def test_parts_of_different_weights_do_not_mix() -> None:
    weight, coded = coded_weight()
    out = torch.empty_like(weight)
    for other in (
        coded_weight(base="base2")[1],
        coded_weight(SHAPES[1])[1],
        Coded(encode(weight, Coding("base3", 64)).base, coded.refinement, 0, False),
        Coded(None, coded.refinement, 0, False),
    ):
        with pytest.raises(SpecterError):
            expand_into(other.base, coded.refinement, out)
    for wrong in (out.half(), out[:, :128], out.T, out.float()):
        with pytest.raises(SpecterError):
            expand_into(coded.base, coded.refinement, wrong)
    _, same_shape = coded_weight(seed=9)
    assert stream_checksum(same_shape.base, coded.refinement) != coded.checksum


def test_what_does_not_gain_is_kept_plain() -> None:
    noise = torch.randint(-(2**15), 2**15, (16, 64), dtype=torch.int16).view(torch.bfloat16)
    for weight in (
        noise,
        torch.zeros(8, 64, dtype=torch.bfloat16).index_fill(1, torch.arange(9), 1),
    ):
        coded = encode(weight, Coding("base4", 64))
        assert coded.plain and len(coded.refinement) == HEADER_BYTES + weight.nbytes
        out = torch.empty_like(weight)
        expand_into(coded.base, torch.cat((coded.refinement, coded.refinement)), out)
        assert torch.equal(out.view(torch.int16), weight.view(torch.int16))
        stream = coded.refinement.clone()
        stream[100] ^= 4
        assert not checked(coded, stream)
        assert expanded(coded, stream[:-1], tuple(weight.shape)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "weight",
    (torch.zeros(4), torch.zeros(2, 3, 4), torch.zeros(4, 4), torch.zeros(0, 4).bfloat16()),
)
def test_what_cannot_be_coded_is_refused(weight: Tensor) -> None:
    with pytest.raises(SpecterError):
        encode(weight, Coding("base4", 64))


@pytest.mark.parametrize("base, group_size", (("base5", 64), ("int4", 64), ("base4", 16)))
def test_codings_that_no_draft_has_are_refused(base: BaseName, group_size: int) -> None:
    with pytest.raises(SpecterError):
        Coding(base, group_size)


def test_an_encoder_that_errs_is_caught_before_anything_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, _ = coded_weight()

    def one_bit_wrong(matrix: CodedMatrix, *rest: Any) -> int:
        size: int = compress_expert(matrix, *rest)
        ctypes.c_uint8.from_address(rest[-2] + size // 2).value ^= 1
        return size

    monkeypatch.setattr(codec, "compress_expert", one_bit_wrong)
    with pytest.raises(SpecterError, match="same bits"):
        encode(weight, Coding("base3", 32))


def native_outcome(
    coded: Coded, stream: Tensor, length: int, portable: bool, rows: int = 4
) -> ExpandOutcome:
    """What the native code alone says of a base3 stream of 4 rows of 64."""
    assert coded.base is not None
    edges = tuple(edge / base_code.EDGE_UNIT for edge in base_code.edges_for(3))
    out = torch.empty(4, 64, dtype=torch.bfloat16)
    base = (coded.base.codes.data_ptr(), coded.base.scales.data_ptr())
    matrix = CodedMatrix(rows, 64, "bfloat16", 3, 32, edges)
    found = (stream.data_ptr(), length, out.data_ptr())
    return expand_expert(matrix, *base, *found, portable=portable)


@pytest.mark.parametrize("portable", (False, True))
def test_the_native_code_needs_no_one_to_check_first(portable: bool) -> None:
    _, coded = coded_weight((4, 64))
    whole, size = coded.refinement, len(coded.refinement)
    assert native_outcome(coded, whole, size, portable) is ExpandOutcome.FINE
    for length in (0, 8, 31, 32, 40, size - 1):
        assert native_outcome(coded, whole, length, portable) is ExpandOutcome.TRUNCATED
    assert native_outcome(coded, whole, size, portable, rows=3) is ExpandOutcome.FOREIGN
    end = int.from_bytes(bytes(whole[36:40].tolist()), "little")
    for wrong in (0, 1, end - 1, end + 1, 2**31):
        stream = whole.clone()
        stream[36:40] = torch.tensor(list(wrong.to_bytes(4, "little")), dtype=torch.uint8)
        assert native_outcome(coded, stream, size, portable) is ExpandOutcome.CORRUPT


def test_plain_bytes_go_only_where_they_came_from() -> None:
    noise = torch.randint(-(2**15), 2**15, (4, 64), dtype=torch.int16).view(torch.bfloat16)
    coded = encode(noise, Coding("base4", 64))
    assert coded.plain
    for wrong in (noise.half(), noise.T.contiguous()):
        with pytest.raises(SpecterError):
            expand_into(coded.base, coded.refinement, wrong)
    for size in (HEADER_BYTES, HEADER_BYTES + noise.nbytes - 2):
        stream = coded.refinement.clone()
        stream[24:32] = torch.tensor(list(struct.pack("<Q", size)), dtype=torch.uint8)
        with pytest.raises(SpecterError):
            expand_into(coded.base, stream, torch.empty_like(noise))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_stream_that_never_ends_is_not_followed(
    base: BaseName | None, shape: tuple[int, int]
) -> None:
    """All ones: every weight goes on and escapes, far past the end; for the address sanitizer."""
    _, coded = coded_weight(shape, base)
    end = HEADER_BYTES + 4 * -(-shape[0] * shape[1] // 1024)
    for last in (None, 2**32 - 1):
        stream = coded.refinement.clone()
        stream[end + 4 :] = 0xFF
        if last:
            stream[end : end + 4] = 0xFF
        assert expanded(coded, stream, shape) is None
