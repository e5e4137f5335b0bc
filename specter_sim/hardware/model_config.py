"""Read the sizes of a MoE decoder from its `config.json`, whatever its family calls them."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from specter_traces.errors import shown

Config = Mapping[str, Any]

DTYPES = {"bfloat16": ("bf16", 16.0), "float16": ("fp16", 16.0), "float32": ("fp32", 32.0)}
MXFP4_BITS = 4 + 8 / 32  # one 8-bit scale for 32 weights
MOST_LAYERS = 10_000
MOST_PARAMS = 10**15
KV_BYTES = 2  # one cached value

NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
UNSUPPORTED_KEYS = ("attn_layer_period", "mamba_d_state", "linear_num_key_heads", "ssm_cfg")
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


class ConfigError(Exception):
    """A config that no shape can be read from; says what is missing or not covered."""


def read_fields(config: Config) -> dict[str, Any]:
    """Every field of a ModelShape but its name and source. Raises ConfigError."""
    try:
        fields = _read_fields(config)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"one of its values is of a wrong kind ({error})") from None
    for name, value in fields.items():
        whole = not isinstance(value, float) or (name.endswith("_bits") and isfinite(value))
        if not isinstance(value, str) and not (whole and 0 <= value < MOST_PARAMS):
            raise ConfigError(f"its values give a senseless {name}: {shown(value)}")
    if fields["top_k"] > fields["num_experts"]:
        raise ConfigError(f"{fields['top_k']} experts a token of {fields['num_experts']}")
    return fields


def _read_fields(config: Config) -> dict[str, Any]:
    config = config.get("text_config") or config  # multimodal configs nest the decoder's
    _refuse_unsupported(config)
    layers, hidden = _int(config, "num_hidden_layers"), _int(config, "hidden_size")
    moe_layers = len(moe_layer_indices(config))
    if moe_layers == 0:
        raise ConfigError("no layer has routed experts: nothing to offload")
    vocab = _int(config, "vocab_size")
    tied = bool(config.get("tie_word_embeddings", False))
    head = vocab * hidden + (vocab if config.get("lm_head_bias") else 0)
    norm_width = hidden * (2 if config.get("model_type") == "phimoe" else 1)
    dense_width = _optional_int(config, "intermediate_size_mlp", "intermediate_size")
    if layers > moe_layers and dense_width is None:
        raise ConfigError('no "intermediate_size", the width of its layers without experts')
    return {
        "num_layers": layers,
        "moe_layers": moe_layers,
        "hidden_size": hidden,
        "dense_ffn_params": (layers - moe_layers) * 3 * hidden * (dense_width or 0),
        "embedding_params": vocab * hidden,
        "head_params": 0 if tied else head,
        "final_norm_params": norm_width,
        "vocab_size": vocab,
        "tied_head": tied,
        **_expert_fields(config, hidden),
        **_attention_fields(config, layers, hidden, 2 * norm_width),
        **_format_fields(config),
    }


def moe_layer_indices(config: Config) -> list[int]:
    """The decoder layers that have routed experts, ascending."""
    count = _int(config, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers must be at most {MOST_LAYERS}, got {shown(count)}")
    layers = range(count)
    if config.get("mlp_layer_types"):
        return [layer for layer in layers if config["mlp_layer_types"][layer] == "sparse"]
    if config.get("moe_layers"):
        return sorted(config["moe_layers"])
    frequency = config.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return [layer for layer in layers if frequency[layer]]
    first = config.get("first_k_dense_replace") or config.get("moe_layer_start_index") or 0
    last = config.get("moe_layer_end_index", -1)
    step = _optional_int(
        config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"
    )
    never = set(config.get("mlp_only_layers") or ())
    return [
        layer
        for layer in layers
        if first <= layer
        and (last < 0 or layer <= last)
        and layer % (frequency or 1) == 0
        and (layer + 1) % (step or 1) == 0
        and layer not in never
    ]


def _expert_fields(config: Config, hidden: int) -> dict[str, Any]:
    experts = _optional_int(config, *NUM_EXPERTS)
    if not experts or experts < 2:
        raise ConfigError(f"not a Mixture-of-Experts model: none of {', '.join(NUM_EXPERTS)}")
    family = config.get("model_type", "")
    width = _int(config, "moe_intermediate_size", "intermediate_size")
    biases = 2 * width + hidden if family == "gpt_oss" else 0
    return {
        "num_experts": experts,
        "top_k": _int(config, *TOP_K),
        "expert_width": width,
        "expert_matrices": 3,
        "expert_params": 3 * hidden * width + biases,
        "expert_bias_params": biases,
        "shared_params_per_layer": _shared_params(config, family, hidden, width),
        "router_params_per_layer": experts * hidden + _router_bias(config, family, experts),
    }


def _shared_params(config: Config, family: str, hidden: int, expert_width: int) -> int:
    width = _optional_int(config, *SHARED_WIDTH) or 0
    if not width:
        width = (_optional_int(config, *SHARED_EXPERTS) or 0) * expert_width
    if family.startswith("llama4"):
        width = expert_width  # always one, stated nowhere in the config
    gate = hidden if family == "qwen2_moe" and width else 0
    return 3 * hidden * width + gate


def _router_bias(config: Config, family: str, experts: int) -> int:
    balanced = config.get("topk_method") == "noaux_tc" or family == "deepseek_v3"
    return experts if balanced or family == "gpt_oss" else 0


def _attention_fields(config: Config, layers: int, hidden: int, norms: int) -> dict[str, Any]:
    heads = _int(config, "num_attention_heads")
    if config.get("kv_lora_rank"):
        params, kv_values, flops = _latent_attention(config, hidden, heads)
    else:
        params, kv_values, flops = _grouped_attention(config, hidden, heads)
    local_layers, window = _local_layers(config, layers)
    return {
        "attention_params_per_layer": params + norms,
        "kv_bytes_per_token": layers * kv_values * KV_BYTES,
        "attention_flops_per_position": flops,
        "local_layers": local_layers,
        "local_window_tokens": window,
    }


def _grouped_attention(config: Config, hidden: int, heads: int) -> tuple[int, int, int]:
    """Weights, cached values a token, and operations a cached position, of one layer."""
    family = config.get("model_type", "")
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    params = 2 * hidden * q_width + 2 * hidden * kv_width
    if config.get("attention_bias"):
        params += q_width + 2 * kv_width + hidden
    elif config.get("qkv_bias", family == "qwen2_moe"):
        params += q_width + 2 * kv_width
    if family == "gpt_oss":
        params += heads  # attention sinks
    elif family == "qwen3_moe":
        params += 2 * head_dim  # norms of queries and keys
    elif family == "olmoe":
        params += q_width + kv_width
    return params, 2 * kv_width, 4 * q_width


def _latent_attention(config: Config, hidden: int, heads: int) -> tuple[int, int, int]:
    """As `_grouped_attention`, for multi-head latent attention in its absorbed form."""
    rank, rope = _int(config, "kv_lora_rank"), _int(config, "qk_rope_head_dim")
    nope, value = _int(config, "qk_nope_head_dim"), _int(config, "v_head_dim")
    q_width, q_rank = heads * (nope + rope), config.get("q_lora_rank") or 0
    query = hidden * q_rank + q_rank * q_width + q_rank if q_rank else hidden * q_width
    key_value = hidden * (rank + rope) + rank * heads * (nope + value) + rank
    params = query + key_value + heads * value * hidden
    return params, rank + rope, 2 * heads * (rank + rope) + 2 * heads * rank


def _local_layers(config: Config, layers: int) -> tuple[int, int]:
    """How many layers attend to a window only, and its length in tokens."""
    kinds = config.get("layer_types")
    if config.get("attention_chunk_size") and not config.get("sliding_window"):
        window, kind = int(config["attention_chunk_size"]), "chunked_attention"
    else:
        window, kind = int(config.get("sliding_window") or 0), "sliding_attention"
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    return (kinds.count(kind) if kinds else layers), window


def _format_fields(config: Config) -> dict[str, Any]:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype.removeprefix("torch.") not in DTYPES:
        raise ConfigError(f'dtype "{dtype}" is not covered: known are {", ".join(DTYPES)}')
    plain_format, plain_bits = DTYPES[dtype.removeprefix("torch.")]
    expert_format, expert_bits, weight_bits = plain_format, plain_bits, plain_bits
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        expert_format = "fp8"
        expert_bits = weight_bits = 8 + (32 / (block[0] * block[1]) if block else 0)
    elif method == "mxfp4":
        expert_format, expert_bits = "mxfp4", MXFP4_BITS
    elif method is not None:
        raise ConfigError(
            f'its weights are quantized with "{method}", which shapes do not cover: '
            "give the config of the original checkpoint"
        )
    return {
        "weight_bits": weight_bits,
        "embedding_bits": plain_bits,
        "expert_bits": expert_bits,
        "expert_format": expert_format,
    }


def _refuse_unsupported(config: Config) -> None:
    for key in UNSUPPORTED_KEYS:
        if config.get(key):
            raise ConfigError(f'hybrid attention ("{key}") is not covered: only full attention is')
    for kind in config.get("layer_types") or ():
        if kind not in ATTENTION_KINDS:
            raise ConfigError(f'layers of type "{kind}" are not covered: only attention is')


def _int(config: Config, *names: str) -> int:
    value = _optional_int(config, *names)
    if value is None or value < 1:
        raise ConfigError(f"{' or '.join(names)} must be a positive number, got {shown(value)}")
    return value


def _optional_int(config: Config, *names: str) -> int | None:
    """The first of `names` that the config gives; of a list (a value a layer) its last entry."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list) and value:
            value = value[-1]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
