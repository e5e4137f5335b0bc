"""Packed draft weights: the bytes they cost, and decoding that is exact to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter_cuda import OutType, decode_codes
from specter_runtime.quantizer import base_code, code_bytes, parse
from specter_runtime.quantizer.packed import PackedWeight

CODES = ["base4", "base3", "base2", "int8", "int4", "int3", "none"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal types, shapes and bits: zeros of another sign differ."""
    assert one.dtype is other.dtype
    return torch.equal(one.view(WORDS[one.dtype]), other.view(WORDS[other.dtype]))


def out_type(dtype: torch.dtype) -> OutType:
    names: dict[torch.dtype, OutType] = {
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
    }
    return names[dtype]


def normal(rows: int, width: int, dtype: torch.dtype, exponent: int = 0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=generator) * 2.0**exponent
    weight[weight.abs() > 60000] = 0.0
    return weight.to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(CODES),
    rows=st.integers(1, 5),
    width=st.integers(1, 300),
    group_size=st.integers(32, 128),
    dtype=st.sampled_from(TYPES),
    exponent=st.integers(-26, 14),
    seed=st.integers(0, 100),
)
def test_a_packed_weight_is_the_draft_weight_bit_for_bit(
    name: str,
    rows: int,
    width: int,
    group_size: int,
    dtype: torch.dtype,
    exponent: int,
    seed: int,
) -> None:
    code = parse(name, group_size)
    weight = normal(rows, width, dtype, exponent, seed)
    weight[0, 0] = -0.0
    packed = PackedWeight.pack(weight, code)
    assert packed.shape == (rows, width)
    assert same_bits(packed.decode(dtype), code.draft_weight(weight))
    for other in TYPES:
        assert same_bits(packed.decode(other), packed.decode_slowly(other))


@settings(max_examples=150, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    rows=st.integers(1, 4),
    width=st.integers(1, 200),
    group_size=st.integers(1, 140),
    dtype=st.sampled_from(TYPES),
    portable=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_native_decoding_is_table_times_scale_rounded_once(
    bits: int,
    rows: int,
    width: int,
    group_size: int,
    dtype: torch.dtype,
    portable: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, width), generator=generator, dtype=torch.uint8)
    groups = -(-width // group_size)
    patterns = torch.randint(0, 0x7C00, (rows, groups), generator=generator, dtype=torch.int16)
    scales = patterns.view(torch.float16)  # every finite scale, subnormal ones included
    table = [] if bits == 8 else torch.randn(2**bits, generator=generator).tolist()
    meaning = codes.view(torch.int8).float() if bits == 8 else torch.tensor(table)[codes.long()]
    of_weight = torch.arange(width) // group_size
    expected = (meaning * scales.float()[:, of_weight]).to(dtype)

    packed = code_bytes.pack(codes, bits, group_size)
    assert packed.shape == (rows, code_bytes.row_bytes(width, group_size, bits))
    assert torch.equal(code_bytes.unpack(packed, bits, group_size, width), codes)
    guard = 77.0
    out = torch.full((rows * width + 64,), guard, dtype=dtype)
    decode_codes(
        packed.data_ptr(),
        scales.data_ptr(),
        table,
        bits,
        rows,
        width,
        group_size,
        out.data_ptr(),
        out_type(dtype),
        portable=portable,
    )
    assert same_bits(out[: rows * width].view(rows, width), expected)
    assert bool((out[rows * width :] == guard).all())


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_ties_round_to_even_for_every_kind_of_scale(
    bits: int, dtype: torch.dtype, portable: bool
) -> None:
    scales = torch.arange(0, 0x7C00, 4, dtype=torch.int16).view(1, -1).view(torch.float16)
    table = torch.arange(16) * 2 + (2049.0 if dtype is torch.float16 else 257.0)
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, scales.numel())
    if bits == 8:
        codes = codes + 112
        table = torch.arange(112.0, 128.0)
    expected = table.repeat(1, scales.numel()) * scales.float().repeat_interleave(16, dim=1)
    packed = code_bytes.pack(codes, bits, 16)
    out = torch.empty(expected.shape, dtype=dtype)
    decode_codes(
        packed.data_ptr(),
        scales.data_ptr(),
        [] if bits == 8 else table.tolist(),
        bits,
        1,
        codes.shape[1],
        16,
        out.data_ptr(),
        out_type(dtype),
        portable=portable,
    )
    assert same_bits(out, expected.to(dtype))


def test_codes_fill_a_group_from_the_lowest_bit_up_and_groups_start_on_a_byte() -> None:
    def packed(codes: list[int], bits: int, group_size: int) -> list[int]:
        row = torch.tensor([codes], dtype=torch.uint8)
        return [int(each) for each in code_bytes.pack(row, bits, group_size)[0]]

    assert packed([0x1, 0x2, 0xF], 4, 32) == [0x21, 0x0F]
    assert packed([1, 2, 3, 0, 2], 2, 32) == [0b00_11_10_01, 0b10]
    assert packed([1, 0, 7, 0b110], 3, 32) == [0b11_000_001, 0b110_1]
    assert packed([5, 6, 7], 4, 1) == [5, 6, 7]
    assert packed([200, 3], 8, 32) == [200, 3]


@pytest.mark.parametrize(
    ("name", "bits"), [("base4", 4), ("base3", 3), ("base2", 2), ("int8", 8), ("int4", 4)]
)
def test_bytes_are_bits_and_one_half_precision_scale_a_group(name: str, bits: int) -> None:
    packed = PackedWeight.pack(normal(48, 256, torch.bfloat16), parse(name, 64))
    assert packed.nbytes == 48 * 256 * bits // 8 + 48 * 4 * 2
    ragged = PackedWeight.pack(normal(3, 70, torch.bfloat16), parse(name, 64))
    assert ragged.nbytes == 3 * (8 * bits + -(-6 * bits // 8) + 2 * 2)


def test_an_unquantized_draft_costs_what_it_is_and_is_kept_apart() -> None:
    weight = normal(4, 32, torch.bfloat16)
    packed = PackedWeight.pack(weight, parse("none"))
    assert packed.nbytes == weight.nbytes
    before = weight.clone()
    weight.zero_()
    assert same_bits(packed.decode(torch.bfloat16), before)


def test_a_slot_is_filled_in_place() -> None:
    weight = normal(6, 96, torch.bfloat16)
    code = parse("base4", 32)
    whole = torch.zeros(3, 6, 96, dtype=torch.bfloat16)
    slot = whole[1]
    assert PackedWeight.pack(weight, code).decode_into(slot) is slot
    assert same_bits(whole[1], code.draft_weight(weight))
    assert not whole[0].any()
    assert not whole[2].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_kernel_multiplies_by_the_weight(
    dtype: torch.dtype, tolerance: float, group_size: int
) -> None:
    packed = PackedWeight.pack(normal(48, 256, dtype), parse("int4", group_size))
    quick = packed.with_kernel(dtype)
    assert quick.kernel is not None
    assert quick.nbytes == packed.nbytes + quick.kernel.nbytes
    x = normal(6, 256, dtype, seed=1).view(2, 3, 256)
    exact = x.float() @ packed.decode(torch.float32).T
    for product in (quick.kernel(x), quick.linear(x), packed.linear(x)):
        assert product.shape == (2, 3, 48)
        assert product.dtype is dtype
        assert float((product.float() - exact).norm() / exact.norm()) < tolerance
    other = torch.float16
    assert same_bits(quick.linear(x.to(other)), packed.linear(x.to(other)))


@pytest.mark.parametrize(
    ("name", "rows", "width", "group_size"),
    [
        ("base4", 16, 64, 64),
        ("int8", 16, 64, 64),
        ("int4", 17, 64, 64),
        ("int4", 16, 65, 64),
        ("int4", 16, 96, 96),
        ("none", 16, 64, 64),
    ],
)
def test_weights_that_torch_has_no_kernel_for_are_decoded(
    name: str, rows: int, width: int, group_size: int
) -> None:
    weight = normal(rows, width, torch.float32)
    code = parse(name, group_size)
    packed = PackedWeight.pack(weight, code).with_kernel(torch.float32)
    assert packed.kernel is None
    x = normal(2, width, torch.float32, seed=1)
    assert same_bits(packed.linear(x), torch.nn.functional.linear(x, code.draft_weight(weight)))


def test_only_a_fitting_tensor_is_written_to() -> None:
    packed = PackedWeight.pack(normal(4, 64, torch.float32), parse("base4"))
    for wrong in (torch.empty(4, 63), torch.empty(5, 64), torch.empty(64, 4).T, torch.empty(256)):
        with pytest.raises(ValueError, match="contiguous"):
            packed.decode_into(wrong)
    with pytest.raises(ValueError, match="float64"):
        packed.decode(torch.float64)
    with pytest.raises(ValueError, match="matrix"):
        PackedWeight.pack(torch.zeros(2, 3, 4), parse("base4"))


def test_a_weight_that_is_not_finite_is_refused() -> None:
    weight = normal(2, 64, torch.bfloat16)
    weight[1, 3] = float("inf")
    for name in ("base4", "int4"):
        with pytest.raises(ValueError, match="finite"):
            PackedWeight.pack(weight, parse(name))


def test_native_decoding_checks_what_it_is_given() -> None:
    table = base_code.gaussian_means(base_code.edges_for(4)).tolist() * 2
    out = torch.empty(1, 32)
    given = (out.data_ptr(), out.data_ptr(), table, 4, 1, 32, 32, out.data_ptr(), "float32")

    def changed(place: int, value: object) -> list[object]:
        return [*given[:place], value, *given[place + 1 :]]

    for place, value, message in (
        (0, 0, "null address"),
        (2, table[:8], "table of 16, got 8"),
        (3, 5, "2, 3, 4 or 8 bits, got 5"),
        (3, 8, "table of 0, got 16"),
        (4, 0, "nothing to decode"),
        (6, 0, "nothing to decode"),
        (8, "int8", "out_type"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_codes(*changed(place, value))  # type: ignore[arg-type]
