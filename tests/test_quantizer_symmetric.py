"""The symmetric integer code: levels, searched scales, error that falls with bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.quantizer import groups, symmetric


def gaussian(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.05


@settings(max_examples=40, deadline=None)
@given(
    bits=st.integers(2, 8),
    size=st.sampled_from([32, 64, 100, 128]),
    width=st.integers(1, 200),
    seed=st.integers(0, 1000),
)
def test_codes_are_levels_and_the_nearest_ones(bits: int, size: int, width: int, seed: int) -> None:
    weight = gaussian(2, width, seed)
    coded = symmetric.encode(weight, bits, size)
    top = 2 ** (bits - 1) - 1
    assert coded.codes.shape == weight.shape
    assert int(coded.codes.abs().max()) <= top
    scale = coded.scales.float().repeat_interleave(size, -1)[..., :width]
    nearest = (weight / scale).clamp(-top, top)
    assert bool(((coded.codes - nearest).abs() <= 0.5001).all())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_searched_scale_beats_the_largest_magnitude(bits: int) -> None:
    weight = gaussian(8, 256, 5)
    top = 2 ** (bits - 1) - 1
    largest = groups.split(weight, 64).abs().amax(-1, keepdim=True)
    plain = (groups.split(weight, 64) / (largest / top)).round() * (largest / top)
    searched = symmetric.encode(weight, bits, 64).decode(torch.float32)
    plain_error = (groups.join(plain, 256) - weight).square().sum()
    assert (searched - weight).square().sum() < 0.95 * plain_error


def test_error_falls_with_every_bit() -> None:
    weight = gaussian(8, 200, 6)
    errors = [
        float((symmetric.encode(weight, bits, 64).decode(torch.float32) - weight).square().sum())
        for bits in range(2, 9)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3 * errors[0]


def test_zeros_stay_zero_and_bad_input_is_refused() -> None:
    assert not symmetric.encode(torch.zeros(1, 40), 4, 32).decode(torch.float32).any()
    with pytest.raises(ValueError, match="2 to 8 bits, got 9"):
        symmetric.encode(torch.ones(1, 32), 9, 32)
    with pytest.raises(ValueError, match="finite"):
        symmetric.encode(torch.tensor([[float("inf")]]), 4, 32)
