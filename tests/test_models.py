"""Model shapes: published totals, expert bytes, and configs of many families."""

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from specter_sim.hardware import StoredFormat, find_model, models, published, shape_from_config
from specter_sim.hardware.model_config import moe_layer_indices
from specter_sim.hardware.models import CATALOGUE
from specter_traces.errors import UsageError

NAMES = sorted(tomllib.loads(CATALOGUE.read_text(encoding="utf-8")))

MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


def read(**changes: Any) -> Any:
    """The shape of the small config with some keys changed; None removes a key."""
    config = {key: value for key, value in (MIXTRAL | changes).items() if value is not None}
    return shape_from_config(config, "small", "small/config.json")


@pytest.mark.parametrize("name", NAMES)
def test_totals_are_the_published_ones(name: str) -> None:
    shape, stated = find_model(name), published(name)
    assert stated is not None
    assert shape.total_params() == pytest.approx(stated.total, rel=0.01)
    # Active counts are published with two digits: 2.4B may mean 2.45.
    active = shape.active_params(stated.active_counts_embedding)
    assert active == pytest.approx(stated.active, rel=0.022)


@pytest.mark.parametrize(
    ("name", "moe_layers", "layers", "experts", "top_k", "expert_bytes"),
    [
        ("deepseek-v2-lite", 26, 27, 64, 6, 17_301_504),
        ("qwen1.5-moe-a2.7b", 24, 24, 60, 4, 17_301_504),
        ("phi-3.5-moe", 32, 32, 16, 2, 157_286_400),
        ("deepseek-v3", 58, 61, 256, 8, 44_040_192 + 4 * 44_040_192 // 128**2),
        ("gpt-oss-20b", 24, 24, 32, 4, 24_883_200 * 17 // 32 + 2 * 8640),
        ("llama-4-maverick", 24, 48, 128, 1, 251_658_240),
        ("tiny-moe", 8, 8, 48, 6, 98_304),
    ],
)
def test_layout_and_expert_bytes(
    name: str, moe_layers: int, layers: int, experts: int, top_k: int, expert_bytes: int
) -> None:
    shape = find_model(name)
    assert (shape.moe_layers, shape.num_layers) == (moe_layers, layers)
    assert (shape.num_experts, shape.top_k) == (experts, top_k)
    assert shape.expert_bytes() == expert_bytes


def test_routed_bytes_of_the_papers_models() -> None:
    found = {name: round(find_model(name).routed_bytes() / 1e9, 2) for name in NAMES}
    assert found["deepseek-v2-lite"] == 28.79
    assert found["qwen1.5-moe-a2.7b"] == 24.91
    assert found["phi-3.5-moe"] == 80.53


def test_the_checkpoint_has_exactly_these_weights(shared: Path) -> None:
    shape = find_model(str(shared / "models" / "tiny-moe"))
    header = (shared / "models" / "tiny-moe" / "model.safetensors").open("rb")
    with header:
        tensors = json.loads(header.read(int.from_bytes(header.read(8), "little")))
    end = max(entry["data_offsets"][1] for key, entry in tensors.items() if key != "__metadata__")
    assert shape.total_bytes() == end
    assert shape.total_params() == find_model("tiny-moe").total_params() == end // 2
    assert shape.name == "tiny-moe"


def test_bytes_and_weights_agree_for_16_bit_models() -> None:
    for name, shape in models().items():
        if shape.weight_bits == shape.expert_bits == 16:
            assert shape.total_bytes() == 2 * shape.total_params(), name


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ({"moe_layer_freq": [0, 0, 1, 1, 0, 1]}, [2, 3, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"interleave_moe_layer_step": 3}, [2, 5]),
        ({"moe_layers": [4, 1]}, [1, 4]),
        ({"mlp_layer_types": ["dense", "sparse"] * 3}, [1, 3, 5]),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 4}, [1, 2, 3, 4]),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: list[int]) -> None:
    assert moe_layer_indices({"num_hidden_layers": 6, **changes}) == layers


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "moe_num_experts"])
def test_families_name_their_experts_differently(key: str) -> None:
    assert read(num_local_experts=None, **{key: 12}).num_experts == 12


def test_every_family_adds_its_own_parts() -> None:
    plain = read()
    assert plain.expert_params == 3 * 64 * 32
    assert plain.attention_params_per_layer == 64 * (64 + 32 + 32) + 64 * 64 + 2 * 64
    assert plain.head_params == 6400 and not plain.tied_head

    def grown(field: str, **changes: Any) -> int:
        return int(getattr(read(**changes), field) - getattr(plain, field))

    attention = "attention_params_per_layer"
    assert grown(attention, attention_bias=True) == 64 + 2 * 32 + 64
    assert grown(attention, model_type="qwen2_moe") == 64 + 2 * 32
    assert grown(attention, model_type="qwen3_moe") == 2 * 16
    assert grown(attention, model_type="olmoe") == 64 + 32
    assert grown(attention, model_type="gpt_oss") == 4
    assert grown(attention, model_type="phimoe") == 2 * 64  # norms with a bias
    assert grown("final_norm_params", model_type="phimoe") == 64
    assert grown("expert_params", model_type="gpt_oss") == 2 * 32 + 64
    assert grown("shared_params_per_layer", n_shared_experts=2) == 2 * 3 * 64 * 32
    shared = {"shared_expert_intermediate_size": 48, "model_type": "qwen2_moe"}
    assert grown("shared_params_per_layer", **shared) == 3 * 64 * 48 + 64
    assert grown("shared_params_per_layer", model_type="llama4_text") == 3 * 64 * 32
    assert grown("router_params_per_layer", topk_method="noaux_tc") == 8
    assert grown("head_params", tie_word_embeddings=True) == -6400
    assert grown("head_params", lm_head_bias=True) == 100
    assert grown("expert_params", moe_intermediate_size=16) == -3 * 64 * 16
    assert grown("dense_ffn_params", first_k_dense_replace=1, intermediate_size_mlp=80) == 15360
    assert grown("kv_bytes_per_token", head_dim=32) == 4 * 2 * 2 * 16 * 2


def test_latent_attention_caches_the_compressed_form() -> None:
    shape = find_model("deepseek-v2-lite")
    assert shape.kv_bytes_per_token == 27 * (512 + 64) * 2
    parts = 2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048
    assert shape.attention_params_per_layer == parts


def test_a_local_layer_caches_its_window_only() -> None:
    shape = find_model("gpt-oss-20b")
    assert (shape.local_layers, shape.local_window_tokens) == (12, 128)
    assert shape.kv_bytes(100) == 100 * shape.kv_bytes_per_token
    assert shape.kv_bytes(1128) == (1128 + 128) * shape.kv_bytes_per_token // 2


@pytest.mark.parametrize(
    ("changes", "stored", "bits"),
    [
        ({}, StoredFormat.BF16, 16),
        ({"torch_dtype": "float16"}, StoredFormat.FP16, 16),
        ({"torch_dtype": None, "dtype": "float32"}, StoredFormat.FP32, 32),
        ({"quantization_config": {"quant_method": "fp8"}}, StoredFormat.FP8, 8),
        ({"quantization_config": {"quant_method": "mxfp4"}}, StoredFormat.MXFP4, 4.25),
    ],
)
def test_stored_formats(changes: dict[str, Any], stored: StoredFormat, bits: float) -> None:
    shape = read(**changes)
    assert (shape.expert_format, shape.expert_bits) == (stored, bits)


def test_nested_text_config_is_read() -> None:
    nested = shape_from_config({"text_config": MIXTRAL, "vision_config": {}}, "small", "x")
    assert nested.total_params() == read().total_params()


def test_treated_as_bf16() -> None:
    shape = find_model("gpt-oss-20b:bf16")
    assert shape.expert_bytes() == 2 * shape.expert_params
    assert shape.expert_format is StoredFormat.BF16
    assert "treated as BF16" in shape.source
    assert find_model("tiny-moe:bf16") == find_model("tiny-moe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a positive number, got None"),
        ({"num_local_experts": None}, "not a Mixture-of-Experts model"),
        ({"first_k_dense_replace": 4}, "no layer has routed experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, 'quantized with "gptq"'),
        ({"torch_dtype": "int8"}, 'dtype "int8" is not covered'),
        ({"layer_types": ["linear_attention"] * 4}, '"linear_attention" are not covered'),
        ({"attn_layer_period": 8}, "hybrid attention"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, got 0"),
    ],
)
def test_configs_without_a_shape(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^small/config.json: .*{re.escape(message)}"):
        read(**changes)


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match='unknown model "mixtral-8x7": did you mean "mixtral-8x7b"'
    ):
        find_model("mixtral-8x7")
    assert find_model("Tiny-MoE").name == "tiny-moe"
    with pytest.raises(UsageError, match="cannot read the model config"):
        find_model(str(tmp_path))
    broken = tmp_path / "broken.json"
    for text in ("{", "[]"):
        broken.write_text(text)
        with pytest.raises(UsageError, match=r"give a model's config\.json"):
            find_model(str(broken))
    broken.write_text(json.dumps(MIXTRAL))
    assert find_model(str(broken)).name == "broken"


SOUND = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "num_attention_heads": 4,
}


def test_the_sound_config_is_read() -> None:
    assert shape_from_config(SOUND, "toy", "toy").moe_layers == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": int("9" * 400)},
        {"hidden_size": int("9" * 400)},
        {"vocab_size": "many"},
        {"num_experts_per_tok": 9},
        {"text_config": 3},
        {"head_dim": float("inf")},
        {"head_dim": float("nan")},
        {"head_dim": "64"},
        {"head_dim": -4},
        {"num_key_value_heads": [2]},
        {"layer_types": 5},
        {"mlp_layer_types": ["sparse"]},
        {"moe_layers": 3},
        {"moe_layers": list(range(9))},
        {"moe_layer_freq": "often"},
        {"first_k_dense_replace": "one"},
        {"mlp_only_layers": 7},
        {"model_type": 3},
        {"sliding_window": float("inf")},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
    ],
)
def test_configs_with_senseless_values_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        shape_from_config(SOUND | change, "toy", "toy/config.json")
    message = str(caught.value)
    assert message.startswith("toy/config.json: ")
    assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_config_files_that_do_not_parse_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match="is not JSON"):
        find_model(str(tmp_path))


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match="a pipe, not a regular file"):
        find_model(str(tmp_path))
