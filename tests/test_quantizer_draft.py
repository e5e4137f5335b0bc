"""Names of draft codes, and draft weights along either input dimension."""

import pytest
import torch

from specter_runtime.quantizer import parse
from specter_traces import DraftKind, UsageError


def test_names_say_kind_and_bits() -> None:
    for name, kind, bits in (
        ("base4", DraftKind.BASE, 4),
        ("base2", DraftKind.BASE, 2),
        ("int8", DraftKind.SYMMETRIC, 8),
        ("int3", DraftKind.SYMMETRIC, 3),
    ):
        code = parse(name, 128)
        assert (code.name, code.kind, code.bits, code.group_size) == (name, kind, bits, 128)


def test_an_unquantized_draft_is_an_equal_copy() -> None:
    weight = torch.randn(4, 40)
    draft = parse("none").draft_weight(weight)
    assert torch.equal(draft, weight)
    assert draft.data_ptr() != weight.data_ptr()
    assert parse("none").group_size == 0


@pytest.mark.parametrize("name", ["base4", "base2", "int4"])
def test_groups_run_along_the_input_dimension(name: str) -> None:
    weight = torch.randn(48, 70, generator=torch.Generator().manual_seed(1))
    code = parse(name, 32)
    rows = code.draft_weight(weight)
    columns = code.draft_weight(weight.T.contiguous(), input_dim=-2)
    assert columns.shape == (70, 48)
    assert torch.equal(columns.T, rows)
    assert not torch.equal(code.draft_weight(weight.T.contiguous()), columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_draft_keeps_the_type_of_the_weights(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 64).to(dtype)
    assert parse("base3").draft_weight(weight).dtype is dtype


def test_unknown_names_and_group_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown draft 'base5'.*base4"):
        parse("base5")
    for size in (31, 129, 0):
        with pytest.raises(UsageError, match=f"32 to 128 weights, got {size}"):
            parse("base4", size)
