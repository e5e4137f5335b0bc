"""A draft weight that torch's 4-bit kernel multiplies by, in an experts loop's own products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live import session_of, text_of, tiny_moe
from torch.nn.functional import linear

from specter_runtime.quantizer import parse
from specter_runtime.quantizer.int4_kernel import Int4Kernel
from specter_runtime.quantizer.kernel_weight import KernelWeight, in_kernel_form
from specter_runtime.quantizer.packed import PackedWeight


def kernel_of(weight: torch.Tensor) -> tuple[Any, torch.Tensor]:
    packed = PackedWeight.pack(weight, parse("int4", 32))
    kernel = in_kernel_form(packed, weight.dtype)
    assert isinstance(kernel, Int4Kernel)
    return KernelWeight(kernel), packed.decode(weight.dtype)


def test_it_multiplies_as_the_weight_would() -> None:
    torch.manual_seed(0)
    weight, decoded = kernel_of(torch.randn(48, 64))
    x, bias = torch.randn(5, 64), torch.randn(48)
    assert torch.allclose(linear(x, weight), linear(x, decoded), atol=1e-4)
    assert torch.allclose(linear(x, weight, bias), linear(x, decoded, bias), atol=1e-4)
    assert torch.allclose(x @ weight, x @ decoded.T, atol=1e-4)


def test_nothing_else_is_done_with_it() -> None:
    weight, _ = kernel_of(torch.randn(48, 64))
    with pytest.raises(TypeError, match="only multiplied by"):
        torch.add(torch.randn(48, 64), weight)
    with pytest.raises(TypeError, match="only multiplied by"):
        linear(torch.randn(48, 64), torch.randn(48, 64), weight)


@pytest.mark.parametrize("name", ["base4", "int8", "int3", "none"])
def test_other_codes_stay_packed(name: str) -> None:
    packed = PackedWeight.pack(torch.randn(48, 64), parse(name, 32))
    assert in_kernel_form(packed, torch.float32) is packed


def test_an_int4_draft_runs_on_it_and_is_charged_for_it() -> None:
    """Its layout alone is kept, so that it costs what packed codes cost, within a tenth."""
    sizes = {}
    for draft in ("int4", "base4"):
        options = {"draft": draft}
        with session_of(tiny_moe("bfloat16"), options, memory__slots=24, policy__depth=3) as live:
            assert live.prepared.draft is not None
            assert len(text_of(live, 12)) == 12
            assert live.result().acceptance > 0.5
            sizes[draft] = live.prepared.draft.nbytes
    assert sizes["base4"] < sizes["int4"] < 1.1 * sizes["base4"]
