"""Loading a mixture-of-experts checkpoint from a folder or the hub, or refusing it with a reason.

No code of the checkpoint is run, pickled weights are never opened.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specter_runtime import fp8, hub
from specter_runtime.coded_files import CodedFile, is_coded
from specter_runtime.coded_store import CodedExperts
from specter_runtime.disk_rate import SAMPLE_BYTES, disk_bytes_per_s
from specter_runtime.experts import find_layers
from specter_runtime.model_loading import Progress, load_model, reason
from specter_runtime.weight_files import Source, StoredTensor, open_weights
from specter_sim.units import format_bytes, format_rate
from specter_traces import SpecterError, UsageError
from specter_traces.errors import shown

BUNDLED_FOLDER = Path(__file__).with_name("models")
"""Models that come with the package, one folder each."""

DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Number types to compute in; `auto` is the checkpoint's own."""

_UNPACKED = ("mxfp4", "fp8")
_MINOR_SHARE = 0.01  # number types of fewer weights go without saying: router biases and the like
_AGAIN = "copy the checkpoint again"


@dataclass(frozen=True)
class LoadTime:
    """What loading took: bytes read from the files, seconds, and the disk's own rate if measured.

    Seconds include building the model and rearranging weights, so the rate is below the disk's.
    """

    read_bytes: int
    load_s: float
    disk_bytes_per_s: float | None = None

    def __str__(self) -> str:
        """ "loaded 43.0 MB in 0.40 s (108 MB/s; disk read 1.20 GB/s)"."""
        rates = format_rate(self.read_bytes / self.load_s)
        if self.disk_bytes_per_s is not None:
            rates += f"; disk read {format_rate(self.disk_bytes_per_s)}"
        return f"loaded {format_bytes(self.read_bytes)} in {self.load_s:.2f} s ({rates})"


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model: its name, weights on this machine, and tokenizer (None when it has none).

    `precision` says what the weights are stored in and, if different, what is computed in;
    `tokenizer_hash` is the SHA-256 of `tokenizer.json`, empty without one. `coded`: the routed
    experts, where they were kept as they are stored; the model has only their shapes then.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    precision: str
    tokenizer_hash: str
    loading: LoadTime | None = None
    coded: CodedExperts | None = None

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


def open_checkpoint(
    model: str,
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    keep_coded: bool = False,
) -> Checkpoint:
    """Load `model`: a bundled name, a folder in transformers' layout, or a hub id "org/name".

    Experts that are stored in coded form are expanded into the model; with `keep_coded` they are
    kept so beside a model that has no weights for them, only shapes. UsageError when there is no
    such model, or it is no complete safetensors checkpoint of a format that is read exactly;
    SpecterError when transformers cannot load it whole.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown number type {dtype!r}: choose one of {', '.join(DTYPES)}")
    folder = find_folder(model)
    began_s = time.perf_counter()
    stored, sources, method = read_folder(folder)
    coded = CodedFile(folder) if is_coded(folder) else None
    chosen = DTYPES[dtype] if coded is None else coded.dtype_for(DTYPES[dtype])
    kept = coded if keep_coded else None
    if kept is not None:
        sources = kept.plain
    network = load_model(folder, sources, chosen, method, progress, experts=kept is None)
    ready = None if kept is None else kept.experts(find_layers(network), progress)
    _choose_generation(folder, network)
    tokenizer = _load_tokenizer(folder)
    load_s = time.perf_counter() - began_s
    return Checkpoint(
        name=folder.name if _is_local(model) else model,
        model=network,
        tokenizer=tokenizer,
        precision=_precision(sources, method, network),
        tokenizer_hash=_hash(folder / "tokenizer.json"),
        loading=_time(stored, load_s),
        coded=ready,
    )


def read_folder(
    folder: Path,
) -> tuple[Mapping[str, StoredTensor], Mapping[str, Source], str]:
    """A checkpoint's tensors as they are stored and as they are read, and their packed format.

    The format is "mxfp4", which transformers unpacks, "fp8", or "". Errors as `open_checkpoint`.
    """
    described = _read_json(folder / "config.json")
    if is_coded(folder):
        file = CodedFile(folder)
        return file.tensors, file.original(), ""
    method = _quantization(folder, described)
    stored = open_weights(folder)
    return stored, _unpacked(stored, described, method), method


def bundled_models() -> list[str]:
    """Names of the models that come with the package, sorted."""
    return sorted(path.parent.name for path in BUNDLED_FOLDER.glob("*/config.json"))


def find_folder(model: str) -> Path:
    """The folder of a bundled name, a path, or a hub id, which is downloaded when need be.

    UsageError, with the nearest bundled name, when it is none of them.
    """
    if model in bundled_models():
        return BUNDLED_FOLDER / model
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        raise _foreign(path, "GGUF")
    if not _is_local(model):
        return hub.snapshot(model)
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise UsageError(f"{model} is a file: give the folder that holds config.json")
    near = difflib.get_close_matches(model, bundled_models(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"bundled: {', '.join(bundled_models())}"
    raise UsageError(f"no model folder {model}; {hint}")


def _is_local(model: str) -> bool:
    return Path(model).exists() or not hub.is_hub_id(model)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        if any(path.parent.glob("*.gguf")):
            raise _foreign(path.parent, "GGUF")
        raise UsageError(
            f"{path.parent} has no {path.name}: give the folder of a transformers model"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {_AGAIN}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object; {_AGAIN}")
    return config


def _quantization(folder: Path, config: dict[str, Any]) -> str:
    """The packed format that is unpacked exactly while loading, "" for none; others are refused."""
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not settings:
        return ""
    if method not in _UNPACKED:
        raise _foreign(folder, shown(method).strip("'").upper() if method else "unnamed format")
    return str(method)


def _foreign(path: Path, method: str) -> UsageError:
    return UsageError(
        f"{path} is quantized ({method}): the target must be the original checkpoint "
        "(BF16, FP16, FP32, FP8 or MXFP4 safetensors); the draft is quantized here"
    )


def _unpacked(
    stored: Mapping[str, StoredTensor], config: dict[str, Any], method: str
) -> Mapping[str, Source]:
    if method == "fp8":
        return fp8.unpack(stored, config["quantization_config"])
    fp8.refuse(stored)
    return stored


def _choose_generation(folder: Path, model: PreTrainedModel) -> None:
    """A checkpoint's own generation settings must not change what we say we sampled."""
    eos = _end_tokens(folder, model)
    settings = GenerationConfig(eos_token_id=eos, pad_token_id=_first(eos))  # type: ignore[no-untyped-call]
    model.generation_config = settings


def _end_tokens(folder: Path, model: PreTrainedModel) -> int | list[int] | None:
    """The tokens that end a text: of the generation settings, else of the config."""
    path = folder / "generation_config.json"
    given = _read_json(path).get("eos_token_id") if path.is_file() else None
    if given is None:
        given = getattr(model.config.get_text_config(), "eos_token_id", None)
    tokens = given if isinstance(given, list) else [given]
    if given is not None and not (tokens and all(type(token) is int for token in tokens)):
        raise UsageError(f"{folder} has eos_token_id {shown(given)}: token ids are expected")
    result: int | list[int] | None = given
    return result


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
    except Exception as error:  # as above
        raise SpecterError(f"cannot load the tokenizer of {folder}: {reason(error)}") from error
    return tokenizer


def _precision(sources: Mapping[str, Source], method: str, model: PreTrainedModel) -> str:
    computed = _plain(model.dtype)
    if method == "fp8":
        arithmetic = "" if computed == "bfloat16" else f", {computed} arithmetic"
        return f"fp8 weights dequantized to bfloat16{arithmetic}"
    stored = "mxfp4" if method == "mxfp4" else " and ".join(_stored_types(sources))
    return computed if stored in ("", computed) else f"{stored} weights, {computed} arithmetic"


def _stored_types(sources: Mapping[str, Source]) -> list[str]:
    """Number types of the weights, the most used first; what hardly occurs is left out."""
    counts: dict[str, int] = {}
    for source in sources.values():
        if source.dtype.is_floating_point:
            name = _plain(source.dtype)
            counts[name] = counts.get(name, 0) + math.prod(source.shape)
    least = _MINOR_SHARE * sum(counts.values())
    return sorted((name for name in counts if counts[name] >= least), key=lambda n: -counts[n])


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _time(stored: Mapping[str, StoredTensor], load_s: float) -> LoadTime:
    """The disk is measured only where the files are large enough to tell."""
    sizes: dict[Path, int] = {}
    for tensor in stored.values():
        sizes[tensor.path] = sizes.get(tensor.path, 0) + tensor.nbytes
    total = sum(sizes.values())
    largest = max(sizes, key=lambda path: sizes[path])
    measured = total > 2 * SAMPLE_BYTES
    return LoadTime(total, load_s, disk_bytes_per_s(largest) if measured else None)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
