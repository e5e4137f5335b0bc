"""FP8 checkpoints: every weight is its code times its scale, rounded once to BF16, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_checkpoints import TOYS, write

from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_runtime.fp8 import dequantize
from specter_traces import UsageError

BLOCK = (16, 32)  # mixtral toy: 32 x 48 matrices, so a block of columns is cut short
SINGLE = "model.safetensors"
E4M3 = torch.float8_e4m3fn
PREFIX = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
Weights = dict[str, Tensor]


def by_hand(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element by element, as the format says."""
    rows = torch.arange(codes.shape[0]) // block[0]
    columns = torch.arange(codes.shape[1]) // block[1]
    return (codes.float() * scales.float()[rows][:, columns]).bfloat16()


def quantize(weights: Weights, block: tuple[int, int] | None = BLOCK) -> tuple[Weights, Weights]:
    """Experts and attention as random codes and scales, and what they stand for."""
    generator = torch.Generator().manual_seed(1)
    packed: Weights = {}
    expected: Weights = {}
    for name, value in weights.items():
        if ".experts." not in name and "self_attn" not in name:
            packed[name] = expected[name] = value.bfloat16()
            continue
        codes = (torch.randn(value.shape, generator=generator) * 8).to(E4M3)
        rows, columns = block or value.shape
        grid = (-(-value.shape[0] // rows), -(-value.shape[1] // columns))
        scales = torch.rand(grid, generator=generator) * 0.02 + 0.001
        expected[name] = by_hand(codes, scales, (rows, columns))
        packed[name] = codes
        packed[f"{name}_scale_inv"] = scales if block else scales.reshape(())
    return packed, expected


def save(folder: Path, weights: Weights, **settings: Any) -> None:
    save_file(weights, folder / SINGLE, metadata={"format": "pt"})
    path = folder / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK), **settings}
    text = {**json.loads(path.read_text()), "dtype": "bfloat16"}
    path.write_text(json.dumps({**text, "quantization_config": quantization}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(TOYS["mixtral"], tmp_path / "toy")


def check(folder: Path, expected: Weights) -> None:
    """Experts in the store and attention in the model are exactly what the codes stand for."""
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.precision == "fp8 weights dequantized to bfloat16"
    store = ExpertStore.take(install(checkpoint.model))
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        assert torch.equal(checkpoint.model.get_parameter(name), expected[name])
        for expert in range(8):
            up = [expected[PREFIX.format(layer, expert, matrix)] for matrix in ("w1", "w3")]
            found = store.weights(layer, expert)
            assert torch.equal(found["gate_up_proj"], torch.cat(up))
            assert torch.equal(found["down_proj"], expected[PREFIX.format(layer, expert, "w2")])


def test_block_scales_with_blocks_that_are_cut_short(folder: Path) -> None:
    packed, expected = quantize(load_file(folder / SINGLE))
    assert packed[PREFIX.format(0, 0, "w2") + "_scale_inv"].shape == (2, 2)  # 48 columns by 32
    save(folder, packed)
    check(folder, expected)


def test_one_scale_a_matrix_without_dimensions(folder: Path) -> None:
    packed, expected = quantize(load_file(folder / SINGLE), None)
    assert packed[PREFIX.format(0, 0, "w1") + "_scale_inv"].ndim == 0
    save(folder, packed, weight_block_size=None)
    check(folder, expected)
    save(folder, packed)  # also where the config speaks of blocks
    check(folder, expected)


def test_scales_of_activations_are_not_needed(folder: Path) -> None:
    packed, expected = quantize(load_file(folder / SINGLE))
    name = PREFIX.format(1, 2, "w1").removesuffix(".weight")
    save(folder, {**packed, f"{name}.activation_scale": torch.ones(())})
    check(folder, expected)


def test_other_arithmetic_is_said(folder: Path) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    save(folder, packed)
    checkpoint = open_checkpoint(str(folder), "float32")
    assert checkpoint.precision == "fp8 weights dequantized to bfloat16, float32 arithmetic"


def test_a_scale_that_was_dropped_is_named(folder: Path) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    name = PREFIX.format(2, 5, "w3")
    del packed[f"{name}_scale_inv"]
    save(folder, packed)
    with pytest.raises(UsageError, match=rf"{name} is stored in FP8 and its scales.*not there"):
        open_checkpoint(str(folder))


def test_codes_that_the_config_does_not_speak_of_are_refused(folder: Path) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    save(folder, packed)
    path = folder / "config.json"
    text = json.loads(path.read_text())
    del text["quantization_config"]
    path.write_text(json.dumps(text))
    with pytest.raises(UsageError, match=r"is stored in FP8, but config\.json has no"):
        open_checkpoint(str(folder))


def test_a_config_that_speaks_of_codes_which_are_not_there_is_refused(folder: Path) -> None:
    save(folder, load_file(folder / SINGLE))
    with pytest.raises(UsageError, match="no weight is stored in FP8"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 2), torch.float32),
        ((2,), torch.float32),
        ((2, 2), torch.int32),
        ((0, 2), torch.float32),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    folder: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    packed[PREFIX.format(2, 5, "w2") + "_scale_inv"] = torch.ones(shape, dtype=dtype)
    save(folder, packed)
    with pytest.raises(UsageError, match=r"experts\.5\.w2\.weight .*does not fit its scales"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("block", [3, [16], [0, 16], [16, "x"], [16.0, 16], [True, 16]])
def test_a_block_that_is_none_is_refused(folder: Path, block: Any) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    save(folder, packed, weight_block_size=block)
    with pytest.raises(UsageError, match="weight_block_size must be two positive numbers"):
        open_checkpoint(str(folder))


def test_four_bit_experts_are_refused(folder: Path) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    save(folder, packed, expert_dtype="fp4")
    with pytest.raises(UsageError, match="experts are stored as 'fp4'"):
        open_checkpoint(str(folder))


def test_a_code_that_is_no_number_is_named(folder: Path) -> None:
    packed, _ = quantize(load_file(folder / SINGLE))
    packed[PREFIX.format(1, 3, "w2")].view(torch.uint8)[4, 5] = 0x7F
    save(folder, packed)
    with pytest.raises(Exception, match=r"NaN or infinity in model\.layers\.1\..*down.*expert 3"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("shape", [(37, 70), (16, 32), (1, 1), (128, 64)])
def test_every_element_gets_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    codes = torch.randn(shape).to(E4M3)
    scales = torch.rand(-(-shape[0] // 16), -(-shape[1] // 32)) + 0.5
    assert torch.equal(dequantize(codes, scales, BLOCK), by_hand(codes, scales, BLOCK))


def test_a_stack_of_matrices_has_a_grid_or_a_scale_each() -> None:
    torch.manual_seed(0)
    codes = torch.randn(4, 20, 40).to(E4M3)
    grids = torch.rand(4, 2, 2)
    whole = dequantize(codes, grids, BLOCK)
    single = dequantize(codes, grids[:, 0, 0], None)
    shared = dequantize(codes, torch.tensor(0.3), None)
    for index in range(4):
        assert torch.equal(whole[index], by_hand(codes[index], grids[index], BLOCK))
        assert torch.equal(single[index], (codes[index].float() * grids[index, 0, 0]).bfloat16())
        assert torch.equal(shared[index], (codes[index].float() * 0.3).bfloat16())


def test_scales_stored_as_exponents_are_powers_of_two(folder: Path) -> None:
    packed, expected = quantize(load_file(folder / SINGLE))
    for name in [name for name in packed if name.endswith("_scale_inv")]:
        exponents = torch.randint(116, 122, packed[name].shape, dtype=torch.uint8)
        weight = name.removesuffix("_scale_inv")
        expected[weight] = by_hand(packed[weight], 2.0 ** (exponents.float() - 127), BLOCK)
        is_typed = "w1" in name
        packed[name] = exponents.view(torch.float8_e8m0fnu) if is_typed else exponents
    save(folder, packed, scale_fmt="ue8m0")
    check(folder, expected)
