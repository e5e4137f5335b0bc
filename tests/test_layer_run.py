"""Experts that run as they arrive: the same bits as the architecture's own loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toy_checkpoints import TOYS, make

from specter_runtime.experts import install, reference
from specter_runtime.layer_run import LayerRun


def inputs(experts: int, top_k: int, width: int, tokens: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    hidden = torch.randn(tokens, width).to(dtype)
    weights = torch.rand(tokens, top_k).to(dtype)
    return hidden, ids, weights


def experts_of(name: str, dtype: torch.dtype) -> tuple[nn.Module, int, int]:
    toy = TOYS[name]
    layer = install(make(toy).to(dtype))[0]  # type: ignore[arg-type]
    return layer.experts, toy.num_experts, toy.top_k


def in_parts(run: LayerRun, sizes: list[int], seed: int) -> Tensor:
    waiting = run.union()
    random.Random(seed).shuffle(waiting)
    for size in sizes:
        part, waiting = waiting[:size], waiting[size:]
        if part:
            run.run(sorted(part))
    if waiting:
        run.run(waiting)
    return run.output()


@pytest.mark.parametrize("name", sorted(TOYS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_any_order_of_arrival_gives_the_bits_of_the_loop(
    name: str, dtype: torch.dtype, tokens: int
) -> None:
    module, experts, top_k = experts_of(name, dtype)
    given = inputs(experts, top_k, 32, tokens, dtype)
    with torch.inference_mode():
        expected = reference(module)(module, *given)
        for seed in range(4):
            run = LayerRun(module, *given)
            assert torch.equal(in_parts(run, [1 + seed % 2, 2], seed), expected)
        whole = LayerRun(module, *given)
        whole.run_all()
    assert torch.equal(whole.output(), expected)
    assert expected.abs().max() > 0


class SumsInFloat32(nn.Module):
    """A loop that adds up in FP32 whatever it computes in, as some architectures do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 6
        self.weight = nn.Parameter(torch.randn(6, 16, 16).bfloat16())

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("the reference loop is called, not the module")

    def loop(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float32)
        mask = torch.nn.functional.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            ranks, tokens = torch.where(mask[expert])
            if len(tokens):
                out = torch.nn.functional.linear(hidden[tokens], self.weight[expert])
                total.index_add_(0, tokens, out.float() * weights[tokens, ranks, None].float())
        return total.to(hidden.dtype)

    forward.__wrapped__ = loop  # type: ignore[attr-defined]


def test_a_sum_in_another_number_type_is_kept() -> None:
    """Rounding each expert's part first would give other bits: shown, so that the test can fail."""
    torch.manual_seed(0)
    module = SumsInFloat32()
    given = inputs(6, 4, 16, 7, torch.bfloat16)
    with torch.inference_mode():
        expected = module.loop(*given)
        run = LayerRun(module, *given)
        assert torch.equal(in_parts(run, [2, 1], 3), expected)
        rounded = torch.zeros_like(expected)
        for expert in range(6):
            one = LayerRun(module, *given)
            one.run([expert])
            rounded += one.output()
    assert not torch.equal(rounded, expected)


def test_a_token_without_experts_gets_zeros() -> None:
    """Routers of some architectures say "none" with an id past the last expert."""
    module, experts, _ = experts_of("qwen3-moe", torch.float32)
    hidden, weights = torch.randn(2, 32), torch.rand(2, 2)
    run = LayerRun(module, hidden, torch.tensor([[experts, 1], [experts, experts]]), weights)
    assert run.union() == [1]
    with torch.inference_mode():
        run.run([1])
    assert run.output()[1].abs().max() == 0 and run.output()[0].abs().max() > 0
    nothing = LayerRun(module, hidden, torch.full((2, 2), experts), weights)
    assert nothing.union() == [] and not nothing.began
    assert torch.equal(nothing.output(), torch.zeros(2, 32))
