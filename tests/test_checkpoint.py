"""Opening checkpoints: what is loaded, what is refused, in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_checkpoints import TOYS, Toy, write

from specter_runtime.checkpoint import bundled_models, find_folder, open_checkpoint
from specter_traces import SpecterError, UsageError

FP4 = torch.tensor([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(TOYS["mixtral"], tmp_path / "toy")


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, remove: str = "", add: str = "") -> None:
    path = folder / "model.safetensors"
    weights = {key: value for key, value in load_file(path).items() if key != remove}
    if add:
        weights[add] = torch.ones(1)
    save_file(weights, path, metadata={"format": "pt"})


def write_mxfp4(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A gpt-oss toy with packed experts, and the weights that the packing stands for."""
    toy = TOYS["gpt-oss"]
    write(Toy("gpt_oss", 3, 8, 2, settings={**toy.settings, "intermediate_size": 64}), folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, Tensor] = {}
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        nibbles = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
        values = FP4[nibbles] * 2.0 ** (scales.float() - 127).unsqueeze(-1)
        expected[name] = values.flatten(-2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    return folder, expected


def test_a_checkpoint_says_what_it_is(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    assert (checkpoint.name, checkpoint.precision) == ("toy", "float32")
    assert (checkpoint.context_tokens, checkpoint.vocabulary) == (128, 96)
    assert checkpoint.tokenizer is None and checkpoint.tokenizer_hash == ""
    assert open_checkpoint(str(folder), "bfloat16").precision == (
        "float32 weights, bfloat16 arithmetic"
    )


def test_the_bundled_model_is_found_by_name_and_whole() -> None:
    assert bundled_models() == ["tiny-moe"]
    checkpoint = open_checkpoint("tiny-moe")
    assert checkpoint.precision == "bfloat16"
    assert checkpoint.tokenizer is not None and len(checkpoint.tokenizer_hash) == 64
    assert sum(value.numel() for value in checkpoint.model.parameters()) == pytest.approx(
        21.6e6, rel=0.01
    )


def test_a_tied_head_needs_no_weights_and_an_untied_one_does(tmp_path: Path) -> None:
    tied = write(TOYS["qwen3-moe"], tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tied / "model.safetensors")
    model: Any = open_checkpoint(str(tied)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(SpecterError, match=r"no weights for lm_head\.weight"):
        open_checkpoint(str(tied))


def test_settings_for_generation_in_a_checkpoint_are_ignored(folder: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.1, "top_k": 1, "eos_token_id": [7, 8]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    config = open_checkpoint(str(folder)).model.generation_config
    assert (config.temperature, config.top_k, config.eos_token_id) == (None, None, [7, 8])


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_quantized_checkpoints_are_refused_by_name(folder: Path, method: str) -> None:
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UsageError, match=rf"is quantized \({method.upper()}\)"):
        open_checkpoint(str(folder))


def test_mxfp4_experts_are_unpacked_exactly(tmp_path: Path) -> None:
    folder, expected = write_mxfp4(tmp_path)
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.precision == "mxfp4 weights, bfloat16 arithmetic"
    loaded = dict(checkpoint.model.named_parameters())
    assert len(expected) == 6
    for name, weight in expected.items():
        assert torch.equal(loaded[name].float(), weight)


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    for place in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(UsageError, match=r"quantized \(GGUF\)"):
            open_checkpoint(str(place))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"not even a pickle")
    with pytest.raises(UsageError, match=r"pickled weights.*safetensors"):
        open_checkpoint(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    names = {key: f"model-0000{1 + (key > 'm')}-of-00002.safetensors" for key in weights}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match="lacks 1 of 2 weight files, first model-00002-of-00002"):
        open_checkpoint(str(folder))


def test_weights_that_do_not_fit_the_config_are_refused(folder: Path) -> None:
    edit_weights(folder, remove="model.norm.weight")
    with pytest.raises(SpecterError, match=r"no weights for model\.norm\.weight"):
        open_checkpoint(str(folder))
    write(TOYS["mixtral"], folder)
    edit_config(folder, vocab_size=80)
    with pytest.raises(SpecterError):
        open_checkpoint(str(folder))


def test_a_quantization_scale_is_never_dropped(folder: Path) -> None:
    edit_weights(folder, add="model.layers.0.self_attn.q_proj.weight_scale_inv")
    with pytest.raises(SpecterError, match="scales that would be ignored"):
        open_checkpoint(str(folder))


def test_a_truncated_file_is_one_clear_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"no whole safetensors file \(it should be"):
        open_checkpoint(str(folder))


def test_code_in_a_checkpoint_is_not_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (folder / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(
        folder,
        model_type="own",
        auto_map={
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.Own",
        },
    )
    with pytest.raises(SpecterError):
        open_checkpoint(str(folder))
    assert not marker.exists()


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no model folder tiny-mo; did you mean 'tiny-moe'\?"):
        find_folder("tiny-mo")
    with pytest.raises(UsageError, match=r"no config\.json"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no weights"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(UsageError, match="unknown number type 'int4'"):
        open_checkpoint("tiny-moe", "int4")


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"weight_map": {"a"',
        "[" * 100_000,
        "[]",
        "3",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        b"\xff\xfe",
    ],
)
def test_a_broken_index_is_named(folder: Path, text: str | bytes) -> None:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "model.safetensors.index.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"index\.json .*: copy the checkpoint again") as caught:
        open_checkpoint(str(folder))
    assert len(str(caught.value).splitlines()) == 1
