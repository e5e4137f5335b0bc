"""Groups of weights: cutting, ragged tails, scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.quantizer import groups


@settings(max_examples=50, deadline=None)
@given(width=st.integers(1, 300), size=st.integers(1, 130), rows=st.integers(1, 3))
def test_split_and_join_lose_nothing(width: int, size: int, rows: int) -> None:
    weight = torch.randn(rows, width)
    cut = groups.split(weight, size)
    assert cut.shape == (rows, -(-width // size), size)
    assert torch.equal(groups.join(cut, width), weight)
    assert int(groups.counts(width, size).sum()) == width


def test_the_padding_of_a_ragged_tail_is_not_part_of_its_scale() -> None:
    weight = torch.full((1, 70), 2.0)
    scales = groups.root_mean_square(groups.split(weight, 64), 70)
    assert scales.tolist() == [[2.0, 2.0]]


def test_a_scale_beyond_fp16_becomes_the_largest_fp16() -> None:
    weight = torch.full((1, 32), 1e6)
    assert groups.root_mean_square(groups.split(weight, 32), 32).tolist() == [[65504.0]]


@pytest.mark.parametrize("size", [0, -1])
def test_a_group_has_at_least_one_weight(size: int) -> None:
    with pytest.raises(ValueError, match="group size"):
        groups.split(torch.zeros(1, 4), size)
