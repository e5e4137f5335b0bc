"""Models by shape: how many bytes and how much arithmetic each part of one forward takes.

A shape is read from a `config.json` (`model_config.py`) or comes from the built-in catalogue
`data/models.toml`, which holds the configuration values of published checkpoints.
"""

import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from specter_sim.hardware.model_config import ConfigError, read_fields
from specter_sim.names import suggestion
from specter_traces.errors import UsageError
from specter_traces.files import refuse_irregular

CATALOGUE = Path(__file__).parent / "data" / "models.toml"
AS_16BIT_SUFFIX = ":bf16"


class StoredFormat(Enum):
    """How a checkpoint stores the weights of its routed experts."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one MoE decoder. Counts are weights unless a name says otherwise.

    Biases and norms are counted with the part they belong to. Multi-token-prediction heads are not
    part of a shape. `kv_bytes_per_token` assumes a 16-bit cache, for multi-head latent attention
    the compressed one.
    """

    name: str
    source: str
    num_layers: int  # all decoder layers
    moe_layers: int  # L
    num_experts: int  # E, routed experts of one layer
    top_k: int  # K
    hidden_size: int  # D
    expert_width: int  # F
    expert_matrices: int
    expert_params: int  # one routed expert, its biases included
    expert_bias_params: int
    shared_params_per_layer: int
    attention_params_per_layer: int  # with the layer's norms
    router_params_per_layer: int
    dense_ffn_params: int  # total over the layers without experts
    embedding_params: int
    head_params: int  # 0 when tied
    final_norm_params: int
    vocab_size: int
    kv_bytes_per_token: int  # all layers
    attention_flops_per_position: int  # one query token, one cached position, one layer
    local_layers: int  # layers that attend to `local_window_tokens` positions only
    local_window_tokens: int
    weight_bits: float  # attention, shared experts, dense layers
    embedding_bits: float  # embeddings, head, routers, norms
    expert_bits: float  # stored bits a weight of routed experts, scales included
    expert_format: StoredFormat
    tied_head: bool

    @property
    def dense_layers(self) -> int:
        """Decoder layers without routed experts."""
        return self.num_layers - self.moe_layers

    @property
    def experts(self) -> int:
        """Routed experts of all layers."""
        return self.moe_layers * self.num_experts

    def expert_bytes(self) -> int:
        """Bytes of one routed expert as the checkpoint stores it; biases take 16 bits."""
        weights = self.expert_params - self.expert_bias_params
        return math.ceil(weights * self.expert_bits / 8) + 2 * self.expert_bias_params

    def routed_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.experts * self.expert_bytes()

    def attention_bytes_per_layer(self) -> int:
        """Bytes of one layer's attention weights and norms."""
        return math.ceil(self.attention_params_per_layer * self.weight_bits / 8)

    def shared_bytes_per_layer(self) -> int:
        """Bytes of the shared experts of one MoE layer."""
        return math.ceil(self.shared_params_per_layer * self.weight_bits / 8)

    def router_bytes_per_layer(self) -> int:
        """Bytes of one router."""
        return math.ceil(self.router_params_per_layer * self.embedding_bits / 8)

    def dense_ffn_bytes(self) -> int:
        """Bytes of the feed-forward weights of all layers without experts."""
        return math.ceil(self.dense_ffn_params * self.weight_bits / 8)

    def head_read_bytes(self) -> int:
        """Bytes read to compute logits: the head, or the embedding it is tied to."""
        params = self.embedding_params if self.tied_head else self.head_params
        return math.ceil(params * self.embedding_bits / 8)

    def dense_bytes(self) -> int:
        """Bytes of everything that is not a routed expert; always resident on the device."""
        ends = self.embedding_params + self.head_params + self.final_norm_params
        return (
            self.num_layers * self.attention_bytes_per_layer()
            + self.moe_layers * (self.shared_bytes_per_layer() + self.router_bytes_per_layer())
            + self.dense_ffn_bytes()
            + math.ceil(ends * self.embedding_bits / 8)
        )

    def total_bytes(self) -> int:
        """Bytes of the whole checkpoint."""
        return self.dense_bytes() + self.routed_bytes()

    def total_params(self) -> int:
        """Weights of the whole model."""
        return self._params_with_experts(self.num_experts) + self.embedding_params

    def active_params(self, count_embedding: bool = True) -> int:
        """Weights one token uses. Publishers differ on whether the input embedding counts."""
        counted = self.embedding_params if count_embedding or self.tied_head else 0
        return self._params_with_experts(self.top_k) + counted

    def kv_bytes(self, context_tokens: int) -> int:
        """Bytes of the KV cache of one sequence of `context_tokens`."""
        return math.ceil(self.kv_bytes_per_token * self.mean_positions(context_tokens))

    def mean_positions(self, context_tokens: int) -> float:
        """Cached positions one layer attends to, averaged over layers."""
        seen = min(context_tokens, self.local_window_tokens)
        local = self.local_layers / self.num_layers
        return (1 - local) * context_tokens + local * seen

    def as_16bit(self) -> "ModelShape":
        """The same shape with its routed experts held as BF16; itself if they already are."""
        if self.expert_format is StoredFormat.BF16:
            return self
        name = f"{self.name}{AS_16BIT_SUFFIX}"
        source = f"{self.source}; routed experts treated as BF16"
        return replace(
            self, name=name, source=source, expert_bits=16.0, expert_format=StoredFormat.BF16
        )

    def _params_with_experts(self, experts_per_layer: int) -> int:
        moe_layer = (
            experts_per_layer * self.expert_params
            + self.shared_params_per_layer
            + self.router_params_per_layer
        )
        return (
            self.moe_layers * moe_layer
            + self.num_layers * self.attention_params_per_layer
            + self.dense_ffn_params
            + self.head_params
            + self.final_norm_params
        )


@dataclass(frozen=True)
class Published:
    """What a model's publisher states, to compare a shape with; weights, as published."""

    title: str
    total: float
    active: float
    active_counts_embedding: bool


def shape_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelShape:
    """The shape a `config.json` describes.

    Raises UsageError when a needed value is missing, the model has no experts, or its attention or
    quantization is of a kind that shapes do not cover.
    """
    try:
        fields = read_fields(config)
    except ConfigError as error:
        raise UsageError(f"{source}: {error}") from None
    fields["expert_format"] = StoredFormat(fields["expert_format"])
    return ModelShape(name=name, source=source, **fields)


def models() -> dict[str, ModelShape]:
    """The built-in models by name."""
    return {
        name: shape_from_config(entry["config"], name, entry["source"])
        for name, entry in _catalogue().items()
    }


def published(name: str) -> Published | None:
    """The published figures of a built-in model; None for any other name."""
    entry = _catalogue().get(name.removesuffix(AS_16BIT_SUFFIX))
    if entry is None:
        return None
    return Published(
        title=entry["title"],
        total=entry["published_total"],
        active=entry["published_active"],
        active_counts_embedding=entry["active_counts_embedding"],
    )


def find_model(name_or_path: str) -> ModelShape:
    """A built-in model by name (case does not count), or one read from a config file or folder.

    The suffix ":bf16" treats routed experts as BF16 whatever their stored format. Raises
    UsageError for an unknown name, naming the nearest.
    """
    if name_or_path.endswith(AS_16BIT_SUFFIX):
        return find_model(name_or_path.removesuffix(AS_16BIT_SUFFIX)).as_16bit()
    entry = _catalogue().get(name_or_path.casefold())
    if entry is not None:
        return shape_from_config(entry["config"], name_or_path.casefold(), entry["source"])
    path = Path(name_or_path)
    if name_or_path and (os.path.isdir(path) or path.suffix == ".json"):
        return _read_config_file(path)
    hint = suggestion(name_or_path, _catalogue())
    raise UsageError(
        f'unknown model "{name_or_path}": {hint} (or give a config.json or a model folder)'
    )


def _read_config_file(path: Path) -> ModelShape:
    file = path / "config.json" if path.is_dir() else path
    refuse_irregular(file)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the model config {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON ({error}): give a model's config.json") from None
    if not isinstance(config, dict):
        raise UsageError(f"{file} holds no JSON object: give a model's config.json")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return shape_from_config(config, name, str(file))


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    return tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
