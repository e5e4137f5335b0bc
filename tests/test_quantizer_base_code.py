"""The base code: exact bins, no zero level, error that falls with bits."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specter_runtime.quantizer import base_code, symmetric

# Written out once more, from the description of the code, so that a change is noticed.
EDGES_64THS = {2: [63], 3: [32, 67, 112], 4: [17, 33, 51, 70, 92, 118, 154]}


def bin_of(magnitude: float, scale: float, bits: int) -> int:
    """The bin of one weight in exact rational arithmetic."""
    return sum(Fraction(magnitude) * 64 >= t * Fraction(scale) for t in EDGES_64THS[bits])


def heavy_tailed(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(rows, width, generator=generator)
    chi = torch.randn(4, rows, width, generator=generator).square().mean(0).sqrt()
    return gauss / chi * 0.02


def squared_error(weight: Tensor, decoded: Tensor) -> float:
    return float((weight.double() - decoded.double()).square().sum())


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([2, 3, 4]),
    size=st.sampled_from([32, 64, 100, 128]),
    width=st.integers(1, 200),
    exponent=st.integers(-30, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_every_weight_is_in_its_bin_exactly(
    bits: int, size: int, width: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(2, width, generator=generator) * 2.0**exponent).to(dtype)
    weight[0, 0] = -0.0
    weight = torch.where(weight.isinf(), torch.ones_like(weight), weight)
    coded = base_code.encode(weight, bits, size)
    for row in range(2):
        for place in range(width):
            code, value = int(coded.codes[row, place]), float(weight[row, place])
            scale = float(coded.scales[row, place // size])
            assert code & (2 ** (bits - 1) - 1) == bin_of(abs(value), scale, bits)
            assert code >> (bits - 1) == int(torch.signbit(weight[row, place]))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_weight_on_an_edge_belongs_to_the_upper_bin(bits: int) -> None:
    edges = base_code.edges_for(bits)
    scale = torch.ones(1, dtype=torch.float16)
    on_edge = torch.tensor([[t / 64 for t in edges]])
    below = torch.nextafter(on_edge, torch.zeros(()))
    assert base_code.magnitude_bins(on_edge, scale, edges).tolist() == [
        list(range(1, len(edges) + 1))
    ]
    assert base_code.magnitude_bins(below, scale, edges).tolist() == [list(range(len(edges)))]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_weight_becomes_zero_and_no_sign_is_lost(bits: int) -> None:
    weight = heavy_tailed(4, 130, seed=1).bfloat16()
    decoded = base_code.encode(weight, bits, 64).decode(torch.float32)
    assert decoded.shape == weight.shape
    assert bool((decoded != 0).all())
    assert torch.equal(torch.signbit(decoded), torch.signbit(weight))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_representatives_are_the_means_of_a_gaussian_in_each_bin(bits: int) -> None:
    sample = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0)).abs()
    edges = base_code.edges_for(bits)
    bins = base_code.magnitude_bins(sample, torch.ones((), dtype=torch.float16), edges)
    for index, mean in enumerate(base_code.gaussian_means(edges).tolist()):
        assert mean == pytest.approx(float(sample[bins == index].mean()), abs=0.005)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_error_falls_with_every_bit(size: int) -> None:
    weight = heavy_tailed(16, 200, seed=2)
    errors = [
        squared_error(weight, base_code.encode(weight, bits, size).decode(torch.float32))
        for bits in (2, 3, 4)
    ]
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
def test_two_bits_beat_the_symmetric_code(tails: str) -> None:
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn(16, 256, generator=generator)
    weight = gaussian if tails == "gaussian" else heavy_tailed(16, 256, seed=3)
    base = squared_error(weight, base_code.encode(weight, 2, 64).decode(torch.float32))
    plain = squared_error(weight, symmetric.encode(weight, 2, 64).decode(torch.float32))
    assert base < 0.8 * plain


def test_a_group_of_zeros_stays_zero() -> None:
    decoded = base_code.encode(torch.zeros(2, 64), 3, 32).decode(torch.float32)
    assert bool((decoded == 0).all())


def test_other_bits_and_weights_without_a_value_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 3 or 4 bits, got 5"):
        base_code.encode(torch.ones(1, 32), 5, 32)
    with pytest.raises(ValueError, match="finite"):
        base_code.encode(torch.tensor([[1.0, float("nan")]]), 2, 32)
