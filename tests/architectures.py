"""Toy configs of the text-generating architectures that use transformers' experts interface.

`python tests/architectures.py` prints the table of the README: what is tested, and how deep.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from toy_checkpoints import LATENT_ATTENTION, VOCABULARY, Toy, make
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
)

from specter_runtime.kv_cache import KvCache

EXPERTS = 8
WINDOW = 12
"""Sliding window of the toys that have one: shorter than a prompt, near the deepest window."""
PROMPT = tuple((11 * i + 5) % VOCABULARY for i in range(WINDOW + 1))
NEW_TOKENS = 64


def _toy(
    model_type: str,
    moe_layers: int,
    top_k: int,
    *,
    router: str = "gate",
    router_shift: float = 0.0,
    seed: int = 0,
    **settings: Any,
) -> Toy:
    return Toy(model_type, moe_layers, EXPERTS, top_k, router, settings, router_shift, seed)


_WIDTH: dict[str, Any] = {"moe_intermediate_size": 24}
# Few index heads would tie at a score of zero, which rounding does not break the same way twice.
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 16}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    **_WIDTH,
}
_MLA: dict[str, Any] = {
    **LATENT_ATTENTION,
    "q_lora_rank": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": EXPERTS,
}
_NAMED: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
_LOCAL: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES: dict[str, Toy] = {
    "afmoe": _toy(
        "afmoe",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        head_dim=8,
        num_shared_experts=1,
        num_dense_layers=1,
        sliding_window=WINDOW,
        global_attn_every_n_layers=2,
        route_scale=1.5,
    ),
    "aria": _toy(
        "aria_text", 3, 2, seed=1, moe_num_experts=8, moe_topk=2, moe_num_shared_experts=1
    ),
    "axk1": _toy("axk1", 2, 3, seed=2, **_MLA),
    "axk2": _toy("axk2", 2, 3, seed=1, **_MLA, **_INDEXER, gated_norm_rank=4),
    "bailing-hybrid": _toy(
        "bailing_hybrid",
        2,
        3,
        seed=3,
        **{**_MLA, "num_local_experts": 8},
        head_dim=8,
        layer_group_size=2,
        short_conv_kernel_size=4,
    ),
    "beam": _toy(
        "beam",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        head_dim=8,
        sliding_window=WINDOW,
        n_group=4,
        topk_group=2,
        layer_types=_SLIDING,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "cohere2-moe": _toy(
        "cohere2_moe",
        2,
        2,
        tie_word_embeddings=False,
        **_NAMED,
        head_dim=8,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        first_k_dense_replace=1,
        num_shared_experts=1,
        logit_scale=1.0,
    ),
    "deepseek-v2": _toy("deepseek_v2", 2, 3, seed=8, **LATENT_ATTENTION, topk_method="greedy"),
    "deepseek-v2-grouped": _toy(
        "deepseek_v2",
        2,
        3,
        **LATENT_ATTENTION,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "deepseek-v3": _toy("deepseek_v3", 2, 3, **_MLA, router_shift=-2.0),
    "deepseek-v32": _toy("deepseek_v32", 2, 3, **_MLA, **_INDEXER),
    "deepseek-v4": _toy(
        "deepseek_v4",
        4,
        2,
        **_WIDTH,
        **_INDEXER,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        partial_rotary_factor=0.5,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
        num_hash_layers=1,
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        layer_types=[
            "heavily_compressed_attention",
            "sliding_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
    ),
    "deepseek-v4-sliding": _toy(
        "deepseek_v4",
        3,
        2,
        **_WIDTH,
        **_INDEXER,
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=16,
        partial_rotary_factor=0.5,
        n_routed_experts=8,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=8,
        hc_mult=2,
        num_hash_layers=1,
        layer_types=["sliding_attention"] * 3,
    ),
    "dots1": _toy(
        "dots1",
        2,
        2,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        sliding_window=WINDOW,
        max_window_layers=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "dots3-note": _toy(
        "dots3_note_text",
        2,
        3,
        seed=1,
        **_MLA,
        **_INDEXER,
        head_dim=16,
        shared_experts_intermediate_size=24,
        sliding_window=WINDOW,
        layer_types=["indexed_attention", "sliding_attention", "indexed_attention"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_q_lora_rank=16,
        swa_kv_lora_rank=16,
        swa_head_dim=16,
        swa_qk_nope_head_dim=8,
        swa_v_head_dim=8,
    ),
    "ernie4.5-moe": _toy(
        "ernie4_5_moe",
        2,
        2,
        seed=5,
        **_WIDTH,
        moe_num_experts=8,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "exaone-moe": _toy(
        "exaone_moe",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        num_shared_experts=1,
    ),
    "flex-olmo": _toy("flex_olmo", 3, 2, seed=2, **_NAMED),
    "flint": _toy(
        "flint",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        head_dim=8,
        sliding_window=WINDOW,
        mlp_only_layers=[0],
        shared_expert_intermediate_size=24,
        layer_types=_SLIDING,
    ),
    "gemma4": _toy(
        "gemma4_text",
        3,
        2,
        tie_word_embeddings=False,
        **_WIDTH,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
    ),
    "glm4-moe": _toy(
        "glm4_moe",
        2,
        2,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        head_dim=8,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
    ),
    "glm4-moe-lite": _toy("glm4_moe_lite", 2, 3, seed=1, **_MLA),
    "glm-moe-dsa": _toy(
        "glm_moe_dsa", 2, 3, **_MLA, **_INDEXER, indexer_types=["full", "shared", "full"]
    ),
    "gpt-oss": _toy(
        "gpt_oss",
        3,
        2,
        router="router",
        router_shift=-30.0,
        **_LOCAL,
        head_dim=8,
        sliding_window=WINDOW,
    ),
    "granitemoe": _toy("granitemoe", 3, 2, seed=2, **_LOCAL),
    "granitemoe-swa": _toy(
        "granitemoe_swa",
        3,
        2,
        seed=1,
        **_LOCAL,
        sliding_window=WINDOW,
        shared_intermediate_size=24,
        layer_types=_SLIDING,
    ),
    "granitemoehybrid": _toy(
        "granitemoehybrid",
        3,
        2,
        seed=1,
        **_LOCAL,
        shared_intermediate_size=24,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_chunk_size=16,
    ),
    "granitemoehybrid-attention": _toy(
        "granitemoehybrid",
        3,
        2,
        seed=2,
        **_LOCAL,
        shared_intermediate_size=24,
        layer_types=["full_attention"] * 3,
        mamba_n_heads=4,
        mamba_d_state=8,
    ),
    "granitemoeshared": _toy("granitemoeshared", 3, 2, **_LOCAL, shared_intermediate_size=24),
    "hunyuan-v1-moe": _toy("hunyuan_v1_moe", 3, 2, num_experts=8, moe_topk=2, head_dim=8),
    "hy-v3": _toy("hy_v3", 2, 2, **_NAMED, **_WIDTH, head_dim=8),
    "hy-v4": _toy("hy_v4", 2, 3, **_MLA, **_INDEXER, hc_mult=2),
    "inkling": _toy(
        "inkling_text",
        2,
        2,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=16,
        dense_mlp_idx=1,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        logits_mup_width_multiplier=1.0,
        route_scale=2.0,
    ),
    "inkling2": _toy(
        "inkling2_text",
        3,
        2,
        seed=1,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        unpadded_vocab_size=96,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=16,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        route_scale=2.0,
        n_layers_per_attn_res_block=2,
    ),
    "inkling2-loop": _toy(
        "inkling2_loop_text",
        3,
        2,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        unpadded_vocab_size=96,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=WINDOW,
        d_rel=4,
        rel_extent=16,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
        route_scale=2.0,
        n_layers_per_attn_res_block=1,
        loop_layer_index_start=1,
        loop_layer_index_end=2,
        loop_num_passes=2,
        loop_gate_rank=4,
    ),
    "jamba": _toy(
        "jamba",
        2,
        2,
        **_NAMED,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    "kimi-linear": _toy(
        "kimi_linear",
        2,
        3,
        **{**_MLA, "q_lora_rank": None, "num_local_experts": 8},
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "kolibri1": _toy(
        "kolibri1",
        3,
        2,
        **_NAMED,
        **_WIDTH,
        num_local_experts=8,
        head_dim=8,
        sliding_window=WINDOW,
        shared_expert_intermediate_size=24,
        layer_types=_SLIDING,
    ),
    "laguna": _toy(
        "laguna",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        head_dim=8,
        sliding_window=WINDOW,
        shared_expert_intermediate_size=24,
        layer_types=_SLIDING,
        moe_routed_scaling_factor=1.5,
    ),
    "lara-mini": _toy(
        "lara_mini",
        3,
        2,
        seed=1,
        **_GATED_DELTA,
        sliding_window=WINDOW,
        layer_types=["linear_attention", "sliding_attention", "full_attention"],
    ),
    "lfm2-moe": _toy(
        "lfm2_moe",
        2,
        2,
        seed=3,
        **_NAMED,
        **_WIDTH,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
        tie_embedding=True,
    ),
    "mellum": _toy(
        "mellum", 3, 2, **_WIDTH, **_LOCAL, head_dim=8, sliding_window=WINDOW, layer_types=_SLIDING
    ),
    "mimo-v2-flash": _toy(
        "mimo_v2_flash",
        2,
        2,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        v_head_dim=8,
        sliding_window=WINDOW,
        n_group=4,
        topk_group=2,
        layer_types=_SLIDING,
    ),
    "minimax": _toy("minimax", 3, 2, **_LOCAL, head_dim=8, block_size=16),
    "minimax-attention": _toy(
        "minimax", 3, 2, seed=7, **_LOCAL, head_dim=8, layer_types=["full_attention"] * 3
    ),
    "minimax-m2": _toy("minimax_m2", 3, 2, **_LOCAL, head_dim=8),
    "minimax-m3": _toy(
        "minimax_m3_vl_text",
        2,
        2,
        **_LOCAL,
        head_dim=16,
        rotary_dim=8,
        dense_intermediate_size=48,
        shared_intermediate_size=24,
        mlp_layer_types=["dense", "sparse", "sparse"],
        index_n_heads=2,
        index_head_dim=16,
        index_block_size=4,
        index_topk_blocks=3,
        layer_types=["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    ),
    "mixtral": _toy("mixtral", 3, 2, seed=1, **_LOCAL),
    "mixtral-sliding": _toy("mixtral", 3, 2, seed=1, **_LOCAL, sliding_window=WINDOW),
    "nemotron-h": _toy(
        "nemotron_h",
        2,
        2,
        seed=1,
        **_WIDTH,
        num_hidden_layers=5,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        n_group=4,
        topk_group=2,
        moe_shared_expert_intermediate_size=24,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        use_mamba_kernels=False,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe", "mlp"],
    ),
    "nemotron-h-attention": _toy(
        "nemotron_h",
        2,
        2,
        seed=4,
        **_WIDTH,
        num_hidden_layers=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        moe_shared_expert_intermediate_size=24,
        ssm_state_size=8,
        mamba_num_heads=4,
        moe_latent_size=16,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
        use_mamba_kernels=False,
        layers_block_type=["full_attention", "moe", "full_attention", "moe"],
    ),
    "olmoe": _toy("olmoe", 3, 2, seed=2, **_NAMED),
    "phimoe": _toy("phimoe", 3, 2, **_LOCAL),
    "phimoe-sliding": _toy("phimoe", 3, 2, seed=1, **_LOCAL, sliding_window=WINDOW),
    "qwen2-moe": _toy(
        "qwen2_moe",
        2,
        2,
        **_NAMED,
        **_WIDTH,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "qwen3-moe": _toy(
        "qwen3_moe",
        3,
        2,
        seed=2,
        **_NAMED,
        **_WIDTH,
        head_dim=8,
        norm_topk_prob=True,
        tie_word_embeddings=True,
    ),
    "qwen3-next": _toy(
        "qwen3_next",
        3,
        2,
        seed=2,
        **_GATED_DELTA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen3.5-moe": _toy(
        "qwen3_5_moe_text",
        3,
        2,
        seed=1,
        **_GATED_DELTA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "qwen4-exp": _toy(
        "qwen4_exp_text",
        3,
        2,
        seed=1,
        **_GATED_DELTA,
        layer_types=["linear_attention", "indexed_attention", "linear_attention"],
        hc_count=2,
        hc_lowrank=4,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=16,
        indexer_compress_ratio=4,
    ),
    "solar-open": _toy(
        "solar_open",
        3,
        2,
        seed=1,
        **_WIDTH,
        n_routed_experts=8,
        num_experts_per_tok=2,
        head_dim=8,
        n_group=4,
        topk_group=2,
    ),
    "zaya": _toy(
        "zaya",
        3,
        1,
        seed=2,
        tie_word_embeddings=False,
        **_WIDTH,
        num_experts=8,
        num_experts_per_tok=1,
        head_dim=8,
        router_hidden_size=16,
        sliding_window=WINDOW,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding"],
    ),
}

CANNOT_SPECULATE = {
    "bailing-hybrid": "recurrent state",
    "deepseek-v4": "compressed keys",
    "granitemoehybrid": "recurrent state",
    "jamba": "recurrent state",
    "kimi-linear": "recurrent state",
    "lara-mini": "recurrent state",
    "minimax": "recurrent state",
    "minimax-attention": "own cache",
    "nemotron-h": "recurrent state",
    "qwen3-next": "recurrent state",
    "qwen3.5-moe": "recurrent state",
    "qwen4-exp": "recurrent state",
    "zaya": "recurrent state",
}
"""What their caches cannot take back: these toys decode one token at a time."""

NO_TEXT_MODEL = {
    "deepseek_ocr2",
    "diffusion_gemma",
    "ernie4_5_vl_moe",
    "glm4v_moe",
    "glm5_next",
    "hy_v4_vl",
    "mistral4",
    "mistral_large4",
    "muse_spark",
    "openai_privacy_filter",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "unlimited_ocr",
}
"""Families with the experts interface that AutoModelForCausalLM does not open."""


@cache
def model_of(name: str) -> PreTrainedModel:
    """The toy called `name`, computing with transformers' own experts loop. Do not change it."""
    model = make(ARCHITECTURES[name])
    model.set_experts_implementation("eager")
    return model


class PlainText(NamedTuple):
    """What transformers' own greedy decoding answers, and how clearly."""

    tokens: list[int]
    logits: Tensor  # [new tokens, V]

    def margin(self) -> float:
        """The smallest distance of the two best logits."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


@cache
def plain_text(name: str) -> PlainText:
    """Plain decoding of the toy called `name`."""
    return decode(model_of(name))


def decode(model: PreTrainedModel) -> PlainText:
    """Greedy text behind PROMPT by transformers' own `generate` and experts loop."""
    model.set_experts_implementation("eager")
    generator: Any = model
    with torch.inference_mode():
        output = generator.generate(
            torch.tensor([PROMPT]),
            generation_config=GenerationConfig(  # type: ignore[no-untyped-call]
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            ),
        )
    return PlainText(output.sequences[0, len(PROMPT) :].tolist(), torch.cat(output.logits))


def markdown() -> str:
    """The README's table: cache, whether windows can be taken back, and the depths tested."""
    rows = [
        "| toy | `model_type` | cache of its layers | speculates | depths tested |",
        "|---|---|---|---|---|",
    ]
    for name, toy in ARCHITECTURES.items():
        stuck = CANNOT_SPECULATE.get(name, "")
        answer = f"no: {stuck} cannot be taken back" if stuck else "yes"
        depths = "0" if stuck else "0, 1, 4, 8"
        rows.append(f"| {name} | `{toy.model_type}` | {cache_of(name)} | {answer} | {depths} |")
    families = ", ".join(f"`{name}`" for name in sorted(NO_TEXT_MODEL))
    return "\n".join([*rows, "", f"Not opened as text models by transformers: {families}."])


def cache_of(name: str) -> str:
    """What the layers of the toy called `name` keep of a text, in words."""
    cache = KvCache(model_of(name))
    with torch.inference_mode():
        cache.forward(model_of(name), torch.tensor(PROMPT))
    words = [*map(_cache_words, cache.layers()), CANNOT_SPECULATE.get(name, "")]
    kinds = dict.fromkeys(filter(None, words))
    return ", ".join(kind for kind in kinds if not any(f"+ {kind}" in other for other in kinds))


def _cache_words(layer: Any) -> str:
    """What one layer's cache keeps; empty for a layer that keeps nothing."""
    words = []
    if isinstance(layer, CacheLayerMixin):
        words.append("sliding window" if getattr(layer, "is_sliding", False) else "all keys")
    if isinstance(layer, DynamicIndexedLayer) or hasattr(layer, "idx_keys"):
        words.append("index keys")
    if hasattr(layer, "compressed_kv"):
        words.append("compressed keys")
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recurrent = any(layer.is_recurrent_states_initialized.values())
        words.append("recurrent state" if recurrent else "convolution state")
    return " + ".join(words)


if __name__ == "__main__":
    print(markdown())
