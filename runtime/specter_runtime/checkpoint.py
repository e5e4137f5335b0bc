"""Loading a mixture-of-experts checkpoint from a local folder, or refusing it with a reason.

Nothing is downloaded, no code of the checkpoint is run, pickled weights are never opened.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.quantization_config import Mxfp4Config

from specter_traces import SpecterError, UsageError

BUNDLED_FOLDER = Path(__file__).with_name("models")
"""Models that come with the package, one folder each."""

DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Number types to compute in; `auto` is the checkpoint's own."""

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_FAILURES = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    ImportError,
    AttributeError,
    TypeError,
    SafetensorError,
)


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: its name, weights on this machine, and tokenizer (None when it has none).

    `precision` says what the weights are stored in and, if different, what is computed in;
    `tokenizer_hash` is the SHA-256 of `tokenizer.json`, empty without one.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    precision: str
    tokenizer_hash: str

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model can read."""
        embedding: Any = self.model.get_input_embeddings()
        return int(embedding.weight.shape[0])

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence the model was made for, None when its config does not say."""
        text = self.model.config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None)
        return int(limit) if limit else None


def open_checkpoint(model: str, dtype: str = "auto") -> Checkpoint:
    """Load the model called `model`: a bundled name, or a folder in transformers' layout.

    UsageError when there is no such folder, or it is no complete, unquantized safetensors
    checkpoint; SpecterError when transformers cannot load it whole.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown number type {dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = find_folder(model)
    config = _read_config(folder)
    packed = _is_mxfp4(folder, config)
    _require_weights(folder)
    network = _load(folder, DTYPES[dtype], packed)
    stored = "mxfp4" if packed else str(config.get("dtype") or config.get("torch_dtype") or "")
    return Checkpoint(
        name=folder.name,
        model=network,
        tokenizer=_load_tokenizer(folder),
        precision=_precision(stored, network),
        tokenizer_hash=_hash(folder / "tokenizer.json"),
    )


def bundled_models() -> list[str]:
    """Names of the models that come with the package, sorted."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def find_folder(model: str) -> Path:
    """The folder of a bundled name or path; UsageError, with the nearest name, when neither."""
    if model in bundled_models():
        return BUNDLED_FOLDER / model
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        raise _foreign(path, "GGUF")
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise UsageError(f"{model} is a file: give the folder that holds config.json")
    near = difflib.get_close_matches(model, bundled_models(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"bundled: {', '.join(bundled_models())}"
    raise UsageError(f"no model folder {model}; {hint}")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        if any(folder.glob("*.gguf")):
            raise _foreign(folder, "GGUF")
        raise UsageError(f"{folder} has no config.json: give the folder of a transformers model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); copy the checkpoint again") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object; copy the checkpoint again")
    return config


def _is_mxfp4(folder: Path, config: dict[str, Any]) -> bool:
    """True for MXFP4 experts, whose values BF16 holds exactly; other packed formats are refused."""
    quantization = config.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if quantization and method != "mxfp4":
        raise _foreign(folder, str(method or "an unnamed format").upper())
    return bool(quantization)


def _foreign(path: Path, method: str) -> UsageError:
    return UsageError(
        f"{path} is quantized ({method}): the target must be the original checkpoint "
        "(BF16, FP16, FP32 or MXFP4 safetensors); the draft is quantized here"
    )


def _require_weights(folder: Path) -> None:
    """Complete safetensors files must be there; every shard that the index names must exist."""
    index = folder / _INDEX
    if index.is_file():
        names = _indexed(index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UsageError(
                f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}: "
                "copy the checkpoint again"
            )
    elif not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
        if pickled:
            raise UsageError(
                f"{folder} holds pickled weights ({pickled[0]}), which can run code when opened: "
                "convert them to safetensors first"
            )
        raise UsageError(f"{folder} holds no weights: no .safetensors file is there")


def _indexed(index: Path) -> list[str]:
    """The weight files that an index names."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{index} is no index of weights ({type(error).__name__}: {error}): "
            "copy the checkpoint again"
        ) from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UsageError(f"{index} names no weight files of its folder: copy the checkpoint again")
    return sorted(names)


def _load(folder: Path, dtype: torch.dtype | None, packed: bool) -> PreTrainedModel:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: PreTrainedModel
    info: dict[str, Any]
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **({"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}),
        )  # type: ignore[misc]
    except _FAILURES as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SpecterError(f"transformers cannot load {folder}: {reason[0]}") from error
    _require_whole(folder, info)
    eos = model.generation_config.eos_token_id
    # A checkpoint's own generation settings must not change what we say we sampled.
    settings = GenerationConfig(eos_token_id=eos, pad_token_id=_first(eos))  # type: ignore[no-untyped-call]
    model.generation_config = settings
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _require_whole(folder: Path, info: dict[str, Any]) -> None:
    """No parameter may keep a random value, no quantization scale be dropped."""
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    scales = sorted(key for key in info.get("unexpected_keys", ()) if "scale" in key)
    for keys, what in (
        (missing, "has no weights for"),
        (mismatched, "has weights of another shape for"),
        (scales, "has quantization scales that would be ignored:"),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise SpecterError(f"{folder} {what} {keys[0]}{more}: copy the checkpoint again")


def _first(eos: int | list[int] | None) -> int:
    if isinstance(eos, list):
        return eos[0]
    return eos or 0


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except _FAILURES as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise SpecterError(f"cannot load the tokenizer of {folder}: {reason[0]}") from error
    return tokenizer


def _precision(stored: str, model: PreTrainedModel) -> str:
    computed = str(model.dtype).removeprefix("torch.")
    return computed if stored in ("", computed) else f"{stored} weights, {computed} arithmetic"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
