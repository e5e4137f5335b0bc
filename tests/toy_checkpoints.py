"""Tiny random checkpoints of many architectures, written from their configs.

Weights are wide enough that routers choose clearly and models disagree when an expert changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Toy:
    """One architecture: its model type, what its config adds, MoE layers, experts and top-k.

    `router_shift` is added to router biases: far below zero, every logit is negative. `seed` draws
    the weights.
    """

    model_type: str
    moe_layers: int
    num_experts: int
    top_k: int
    router: str = "gate"
    settings: dict[str, Any] = field(default_factory=dict)
    router_shift: float = 0.0
    seed: int = 0


TOYS: dict[str, Toy] = {
    "mixtral": Toy("mixtral", 3, 8, 2, settings={"num_local_experts": 8}),
    "qwen2-moe": Toy(
        "qwen2_moe",
        2,
        8,
        2,
        settings={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe": Toy(
        "qwen3_moe",
        3,
        8,
        3,
        settings={
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "head_dim": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": Toy("olmoe", 3, 8, 2, settings={"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek-v2": Toy(
        "deepseek_v2", 2, 8, 3, settings={**LATENT_ATTENTION, "topk_method": "greedy"}
    ),
    "deepseek-v2-grouped": Toy(
        "deepseek_v2",
        2,
        8,
        3,
        settings={
            **LATENT_ATTENTION,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "deepseek-v3": Toy(
        "deepseek_v3",
        2,
        8,
        3,
        settings={**LATENT_ATTENTION, "q_lora_rank": 16, "n_group": 4, "topk_group": 2},
    ),
    "phimoe": Toy(
        "phimoe",
        3,
        8,
        2,
        router="router",
        settings={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss": Toy(
        "gpt_oss",
        3,
        8,
        2,
        router="router",
        settings={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 16,
        },
    ),
}


def make(toy: Toy, seed: int | None = None) -> PreTrainedModel:
    """A random FP32 model of `toy`; what transformers leaves at zero is random too."""
    config = AutoConfig.for_model(toy.model_type, **{**_COMMON, **toy.settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(toy.seed if seed is None else seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        with torch.no_grad():
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                _randomize(toy, name, value)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _randomize(toy: Toy, name: str, value: Tensor) -> None:
    """Fill what would hide a fault if it stayed zero: biases, routers, tables of experts."""
    if name.endswith("tid2eid"):
        value.copy_(torch.rand(len(value), toy.num_experts).topk(value.shape[-1]).indices)
    elif name.endswith("bias"):
        value.normal_(std=0.1)
        if f"{toy.router}." in name:
            value.add_(toy.router_shift)
    elif value.ndim >= 2 and value.is_floating_point() and not value.any():
        value.normal_(std=0.2)


def write(toy: Toy, folder: Path, seed: int | None = None) -> Path:
    """Save a random model of `toy` as a transformers checkpoint in `folder`; the folder."""
    make(toy, seed).save_pretrained(folder)
    return folder
