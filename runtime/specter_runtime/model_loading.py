"""Filling a transformers model from a checkpoint's tensors, read one by one.

transformers knows every layout of weights, and takes any state dict. Ours holds tensors that are
read when their turn comes. So memory holds the model and the layer that is being rearranged, and
what the config describes is compared with what the files hold before anything is allocated.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from specter_runtime.experts import expert_weights, find_layers
from specter_runtime.freed_memory import give_back
from specter_runtime.weight_files import Source
from specter_traces.errors import SpecterError, UsageError, printable, shown

Progress = Callable[[int, int], None]
"""Told (bytes read so far, bytes in all) after every tensor."""

_EXPERT = re.compile(r"(?P<layer>.*\bexperts)\.(?P<expert>\d{1,6})\.(?P<matrix>.+)", re.ASCII)
_SPARE_ELEMENTS = 1 << 24  # buffers that a model computes and no file holds
_HELD_BACK_BYTES = 64 << 20  # read before freed memory goes back to the system
_AGAIN = "copy the checkpoint again"


def load_model(
    folder: Path,
    sources: Mapping[str, Source],
    dtype: torch.dtype | None = None,
    quantization: str = "",
    progress: Progress | None = None,
    *,
    experts: bool = True,
) -> PreTrainedModel:
    """The model of the config in `folder` with the weights `sources`, all of them there and finite.

    `dtype` is what to compute in, None for the config's own. `quantization` is "mxfp4" when
    transformers has packed tensors to unpack, "fp8" when the sources unpack theirs. Without
    `experts` the sources have no routed experts, and the model has only their shapes, on the meta
    device. UsageError when
    the config describes another model than the files hold, SpecterError when transformers fails,
    a weight is missing, left over or not finite, or the model cannot read two tokens.
    """
    _require_every_expert(folder, sources)
    reading = _Reading(sources, progress)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with _no_reading_ahead(), _threads(torch.get_num_threads() if quantization else 1):
            skeleton = build_skeleton(folder, reading.sources, experts=experts)
            kind = type(skeleton) if experts else _without_experts(type(skeleton))
            model, info = _fill(kind, skeleton.config, reading, dtype, quantization)
    except SpecterError:
        raise
    except Exception as error:  # broken configs fail anywhere in transformers, in any way
        raise SpecterError(f"transformers cannot load {folder}: {reason(error)}") from error
    reading.finish()
    model.eval()  # type: ignore[no-untyped-call]
    with _threads(1):
        _require_whole(folder, info, model)
        _require_finite(folder, model)
        if experts:
            _require_running(folder, model)
        else:
            _give_shapes(model, skeleton)
    return model


def reason(error: BaseException) -> str:
    """The first line of what an error of another library says, fit for a terminal."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] += f" {lines[1].strip()}"
    return printable(lines[0])


class _Reading:
    """The checkpoint's tensors as transformers wants them: read one by one, and counted."""

    def __init__(self, sources: Mapping[str, Source], progress: Progress | None) -> None:
        self.sources = sources
        self._progress = progress
        self._total_bytes = sum(source.nbytes for source in sources.values())
        self._read_bytes = 0
        self._give_back_at = 0

    def tensors(self) -> dict[str, _Unread]:
        """A state dict whose tensors are read when they are sliced."""
        return {name: _Unread(source, self) for name, source in self.sources.items()}

    def read(self, source: Source) -> Tensor:
        """One tensor, and word of it."""
        tensor = source.read()
        self._read_bytes += source.nbytes
        if self._read_bytes >= self._give_back_at:  # what merging experts left behind
            give_back()
            self._give_back_at = self._read_bytes + min(self._total_bytes // 32, _HELD_BACK_BYTES)
        if self._progress is not None:
            self._progress(self._read_bytes, self._total_bytes)
        return tensor

    def finish(self) -> None:
        """Word of the end: tensors that the model has no use for are not read."""
        if self._progress is not None and self._read_bytes != self._total_bytes:
            self._progress(self._total_bytes, self._total_bytes)


class _Unread:
    """A tensor of a state dict that is read from its file when sliced with [...]."""

    def __init__(self, source: Source, reading: _Reading) -> None:
        self._source = source
        self._reading = reading

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._source.shape)

    def is_floating_point(self) -> bool:
        return self._source.dtype.is_floating_point

    def __getitem__(self, item: Any) -> Any:
        return self._reading.read(self._source)[item]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside.

    One copies faster than a disk reads, and threads that share busy cores wait for each other at
    every small copy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_reading_ahead() -> Iterator[None]:
    """Keep transformers from reading ahead, which would hold the checkpoint twice."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def build_skeleton(
    folder: Path, sources: Mapping[str, Source], *, experts: bool = True
) -> PreTrainedModel:
    """The model that the config describes, without memory for its weights.

    UsageError when the files cannot hold it: before anything large is allocated for it. `experts`:
    whether they hold routed experts.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _require_plausible(folder, config.to_dict(), sources)
    # What computes attention and experts is chosen here: a name in a config may fetch code.
    config._attn_implementation = config._experts_implementation = None
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=False
        )
    if hasattr(config, "quantization_config"):  # also when the model is only the text part
        model.config.quantization_config = config.quantization_config
    described = sum(value.numel() for value in (*model.parameters(), *model.buffers()))
    if not experts:
        described -= sum(value.numel() for value in _expert_weights(model).values())
    held = sum(_elements(source) for source in sources.values())
    if described > 2 * held + _SPARE_ELEMENTS:
        raise UsageError(
            f"{folder}/config.json describes {described:.4g} weights, the files hold {held:.4g}: "
            f"{_AGAIN}"
        )
    return model


def _require_every_expert(folder: Path, names: Iterable[str]) -> None:
    """UsageError naming a matrix that some experts of a layer have and one has not."""
    found: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if match := _EXPERT.fullmatch(name):
            kinds = found.setdefault(match["layer"], {})
            kinds.setdefault(match["matrix"], set()).add(int(match["expert"]))
    for layer, kinds in found.items():
        experts = 1 + max(max(ids) for ids in kinds.values())
        for matrix, ids in kinds.items():
            absent = next((expert for expert in range(experts) if expert not in ids), None)
            if absent is not None:
                raise UsageError(
                    f"{folder} has no {printable(f'{layer}.{absent}.{matrix}')}, one of {experts} "
                    f"experts: {_AGAIN}"
                )


def _elements(source: Source) -> int:
    """Weights that a stored tensor stands for: MXFP4 packs two into a byte."""
    length = math.prod(source.shape)
    return 2 * length if source.dtype == torch.uint8 else length


def _require_plausible(
    folder: Path, config: Mapping[str, Any], sources: Mapping[str, Source]
) -> None:
    """Refuse numbers of layers and experts that no file of this size can hold.

    Every layer has a tensor; every expert is a row of its router. Generous, as configs also carry
    numbers of parts that are not loaded: it keeps a broken one from building modules for hours.
    """
    longest = max((max(source.shape, default=0) for source in sources.values()), default=0)
    limits = {"layers?": max(1000, 4 * len(sources)), "experts": max(10_000, 4 * longest)}
    for name, value in _numbers(config):
        if name == "num_hidden_layers" and value < 1:
            raise UsageError(f"{folder}/config.json says {name} = {value}: {_AGAIN}")
        for word, limit in limits.items():
            if re.fullmatch(rf"(n|num)_(\w+_)?{word}", name) and value > limit:
                raise UsageError(
                    f"{folder}/config.json says {name} = {shown(value)}, more than these files "
                    f"can hold: {_AGAIN}"
                )


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, int):
            yield name, value
        elif isinstance(value, dict):
            yield from _numbers(value)


def _expert_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routed experts' weights of all layers, by name."""
    return {
        f"{layer.name}.{name}": weight
        for layer in find_layers(model)
        for name, weight in expert_weights(layer.experts).items()
    }


def _without_experts(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The same architecture, whose models have no weights for routed experts to be filled."""

    def build(self: PreTrainedModel, *given: Any, **named: Any) -> None:
        kind.__init__(self, *given, **named)
        for name in _expert_weights(self):
            module = self.get_submodule(name.rpartition(".")[0])
            del module._parameters[name.rpartition(".")[2]]
            module._is_hf_initialized = True  # type: ignore[assignment]

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def _give_shapes(model: PreTrainedModel, skeleton: PreTrainedModel) -> None:
    """Give a model without experts the shapes of their weights, and its own class."""
    model.__class__ = type(skeleton)
    for name, weight in _expert_weights(skeleton).items():
        module, _, own = name.rpartition(".")
        shaped = torch.empty(weight.shape, dtype=model.dtype, device="meta")
        model.get_submodule(module)._parameters[own] = nn.Parameter(shaped, requires_grad=False)


def _fill(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    reading: _Reading,
    dtype: torch.dtype | None,
    quantization: str,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of a class with the checkpoint's weights, and what transformers says of it."""
    options: dict[str, Any] = {}
    if quantization == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    elif hasattr(config, "quantization_config"):  # whatever was packed is unpacked already
        del config.quantization_config
    loader: Any = kind
    model, info = loader.from_pretrained(
        None,
        config=config,
        state_dict=reading.tensors(),
        dtype=dtype or "auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # we refuse them, by name
        **options,
    )
    return model, info


def _require_whole(folder: Path, info: dict[str, Any], model: nn.Module) -> None:
    """No parameter may keep a random value, no scale be dropped, no layer or expert be left out."""
    missing = sorted(info.get("missing_keys", ()))
    mismatched = sorted(_name(key) for key in info.get("mismatched_keys", ()))
    unexpected = sorted(info.get("unexpected_keys", ()))
    scales = [key for key in unexpected if "scale" in key]
    known = {_without_numbers(key) for key in model.state_dict()}
    left_out = [key for key in unexpected if _without_numbers(key) in known]
    for keys, what in (
        (mismatched, "has weights of another shape than config.json says for"),
        (missing, "has no weights for"),
        (scales, "has quantization scales that would be ignored:"),
        (left_out, "has weights of a part that config.json leaves out:"),
    ):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise SpecterError(f"{folder} {what} {printable(keys[0])}{more}: {_AGAIN}")


def _name(key: Any) -> str:
    """The name in what transformers says of a mismatch: (name, shape, shape)."""
    return str(key[0] if isinstance(key, tuple) else key)


def _without_numbers(key: str) -> str:
    return re.sub(r"\d+", "*", key)


def _require_finite(folder: Path, model: nn.Module) -> None:
    """SpecterError naming the first weight that is NaN or infinite, in the file or once cast."""
    for name, value in model.state_dict().items():
        if not value.is_floating_point() or _is_finite(value):
            continue
        bad = [row for row in range(len(value)) if not _is_finite(value[row])] if value.ndim else []
        where = f" (expert {bad[0]})" if value.ndim == 3 else ""
        raise SpecterError(f"{folder} holds NaN or infinity in {name}{where}: {_AGAIN}")


def _require_running(folder: Path, model: PreTrainedModel) -> None:
    """SpecterError when two tokens cannot be read: a config that contradicts itself, huge weights.

    Text written with such a model would be noise, or end in a failure far from its cause.
    """
    try:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=torch.tensor([[0, 1]]), use_cache=False).logits
    except Exception as error:  # as above
        raise SpecterError(
            f"the model of {folder} cannot read a token ({reason(error)}): {_AGAIN}"
        ) from error
    if not logits.amax().isfinite():
        raise SpecterError(f"{folder} computes NaN or infinity for its tokens: {_AGAIN}")


def _is_finite(value: Tensor) -> bool:
    """The extremes show NaN and infinity, and need no memory as large as the tensor."""
    return value.numel() == 0 or bool(torch.stack(value.aminmax()).isfinite().all())
