"""Encoding a checkpoint's folder into one with coded experts, and decoding it again.

A folder appears under its name when everything in it is there, or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specter_runtime.checkpoint import find_folder, open_checkpoint, read_folder
from specter_runtime.codec import Coding, stream_checksum
from specter_runtime.coded_files import CODED_FILE, PREFIX, CodedFile, is_coded
from specter_runtime.coded_header import METADATA_KEY, CodedHeader, CodedLayerFacts, CodedMatrix
from specter_runtime.coded_store import CodedLayer, CodedStore
from specter_runtime.coding_report import exact_dtype, refuse_packed
from specter_runtime.expert_origins import find_origins
from specter_runtime.expert_store import checksum
from specter_runtime.experts import ExpertLayer, expert_weights, find_layers
from specter_runtime.model_loading import Progress, build_skeleton
from specter_runtime.quantizer.packed import PackedWeight
from specter_runtime.stored_experts import expert_tensors
from specter_runtime.weight_files import INDEX, StoredTensor, header_text
from specter_runtime.weight_writing import Output, write_under_header, write_weights
from specter_traces.errors import SpecterError, UsageError
from specter_traces.files import write_atomic

_WEIGHTS = frozenset(
    (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
)
"""Endings of weight files, which are not copied with the rest of a folder."""


class Sizes(NamedTuple):
    """Bytes of a checkpoint's weight files before and after."""

    before_bytes: int
    after_bytes: int


def encode_folder(
    model: str, out: Path, coding: Coding, dtype: str = "auto", progress: Progress | None = None
) -> Sizes:
    """Write `model` (as `open_checkpoint` finds it) to the new folder `out`, its experts coded.

    Every stored tensor is compared with what is encoded, and every code verified. UsageError for a
    model whose experts cannot be coded, or a folder that is there; SpecterError for a layout that
    could not be restored.
    """
    folder = find_folder(model)
    _require_new(out)
    if is_coded(folder):
        raise UsageError(f"the experts of {folder} are coded already")
    stored, sources, method = read_folder(folder)
    refuse_packed(folder, method, "mxfp4", "fp8")
    _require_free_names(folder, stored)
    tensors = expert_tensors(sources, find_layers(build_skeleton(folder, sources)))
    if not tensors:
        raise SpecterError(f"{folder} has no routed experts that are known how to be read")
    kinds = sorted({tensor.source.dtype for tensor in tensors}, key=str)
    exact = _name(exact_dtype(folder, kinds, dtype))
    layers = find_layers(open_checkpoint(str(folder), exact, progress).model)
    origins = find_origins(tensors, layers)
    facts = tuple(_facts(layer) for layer in layers)
    coded = CodedStore.take(layers, coding).ready
    assert coding.base is not None
    files = {path.name: header_text(path) for path in _paths(stored)}
    index = folder / INDEX
    header = CodedHeader(
        coding.base,
        coding.group_size,
        exact,
        _name(kinds[0]),
        facts,
        origins,
        files,
        index.read_text(encoding="utf-8") if index.is_file() else "",
    )
    plain = [each for name, each in stored.items() if name not in {o.name for o in origins}]
    with _new_folder(out) as temporary:
        _copy_others(folder, temporary)
        outputs = [*_plain_outputs(plain), *_coded_outputs(coded.layers, facts)]
        write_weights(temporary / CODED_FILE, outputs, {METADATA_KEY: header.text()})
    return Sizes(_total(_paths(stored)), _total([out / CODED_FILE]))


def decode_folder(coded: Path, out: Path, progress: Progress | None = None) -> Sizes:
    """Restore the checkpoint that was encoded into the folder `coded`, byte for byte, in `out`.

    UsageError for a folder that holds no coded checkpoint, a damaged one, or one whose experts
    were converted when they were encoded; and for an `out` that is there.
    """
    if not is_coded(coded):
        raise UsageError(f"{coded} holds no coded checkpoint: there is no {CODED_FILE}")
    _require_new(out)
    file = CodedFile(coded)
    header = file.header
    if header.dtype != header.stored_dtype:
        raise UsageError(
            f"the experts of {coded} were converted from {header.stored_dtype} to {header.dtype} "
            "when they were encoded: the original's bits are not in it"
        )
    with _new_folder(out) as temporary:
        _copy_others(coded, temporary)
        if header.index:
            write_atomic(temporary / INDEX, header.index)
        _restore_files(file, temporary, progress)
    return Sizes(_total([coded / CODED_FILE]), _total([out / name for name in header.files]))


def _restore_files(file: CodedFile, folder: Path, progress: Progress | None) -> None:
    sources, done = file.original(), 0
    total = sum(source.nbytes for source in sources.values())
    for name, text in file.header.files.items():
        if Path(name).name != name:
            raise file.broken(f"it names a file {name!r}")
        outputs = []
        for tensor in _in_order(text):
            if tensor not in sources:
                raise file.broken(f"it does not hold {tensor}")
            source = sources[tensor]
            outputs.append(Output(tensor, source.dtype, source.shape, source.read))
        write_under_header(folder / name, text, outputs)
        done += sum(sources[each.name].nbytes for each in outputs)
        if progress is not None:
            progress(done, total)


def _in_order(header: str) -> list[str]:
    """Names of a file's tensors in the order of their bytes."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    return sorted(entries, key=lambda name: entries[name]["data_offsets"])


def _plain_outputs(plain: Sequence[StoredTensor]) -> list[Output]:
    """The tensors that stay as they are, and their checksums."""
    ordered = sorted(plain, key=lambda each: each.name)
    checksums = torch.tensor([checksum(each.read()) for each in ordered], dtype=torch.int64)
    outputs = [Output(each.name, each.dtype, each.shape, each.read) for each in ordered]
    return [*outputs, _output("checksums", checksums)]


def _coded_outputs(
    layers: Sequence[CodedLayer], facts: Sequence[CodedLayerFacts]
) -> Iterator[Output]:
    for index, (layer, told) in enumerate(zip(layers, facts, strict=True)):
        names = [matrix.name for matrix in told.matrices]
        sizes = [[place[name][1] - place[name][0] for name in names] for place in layer.places]
        yield _output(f"{index}.sizes", torch.tensor(sizes, dtype=torch.int64))
        yield _output(f"{index}.checksums", _checksums(layer, names))
        yield _output(f"{index}.refinements", layer.memory)
        for name in names:
            bases = [_present(of_expert[name]) for of_expert in layer.bases]
            for kind, parts in (
                ("codes", [base.codes for base in bases]),
                ("scales", [base.scales for base in bases]),
            ):
                shape = (len(parts), *parts[0].shape)
                stack = partial(torch.stack, parts)
                yield Output(f"{PREFIX}{index}.{name}.{kind}", parts[0].dtype, shape, stack)


def _checksums(layer: CodedLayer, names: Sequence[str]) -> Tensor:
    """CRC-32 of each expert's matrices, [E, M]."""
    values = []
    for expert, place in enumerate(layer.places):
        run = layer.memory[layer.begins[expert] : layer.begins[expert + 1]]
        parts = {name: run[place[name][0] : place[name][1]] for name in names}
        values.append([stream_checksum(layer.bases[expert][name], parts[name]) for name in names])
    return torch.tensor(values, dtype=torch.int64)


def _output(name: str, tensor: Tensor) -> Output:
    return Output(f"{PREFIX}{name}", tensor.dtype, tuple(tensor.shape), lambda: tensor)


def _present(base: PackedWeight | None) -> PackedWeight:
    assert base is not None, "coded with a base"
    return base


def _facts(layer: ExpertLayer) -> CodedLayerFacts:
    matrices = []
    for name, weight in expert_weights(layer.experts).items():
        rows, width = layer.as_rows(weight[0]).shape
        matrices.append(CodedMatrix(name, tuple(weight.shape[1:]), rows, width))
    return CodedLayerFacts(layer.name, layer.num_experts, tuple(matrices))


def _require_free_names(folder: Path, names: Mapping[str, object]) -> None:
    taken = next((name for name in names if name.startswith(PREFIX)), None)
    if taken is not None:
        raise UsageError(f"{folder} has a tensor {taken}: names of coded experts begin so")


def _require_new(out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} is there already: give a new folder")
    if not out.resolve().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.resolve().parent}")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that is called `out` once everything in it is written."""
    try:
        temporary = Path(tempfile.mkdtemp(dir=out.resolve().parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp makes folders private
        os.rename(temporary, out)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {out}: {error.strerror}") from None
        raise


def _copy_others(source: Path, target: Path) -> None:
    """Config, tokenizer and whatever else a folder holds beside its weights."""
    for path in sorted(source.iterdir()):
        hidden = path.name.startswith(".")
        if path.is_file() and not hidden and path.suffix not in _WEIGHTS and path.name != INDEX:
            shutil.copyfile(path, target / path.name)


def _paths(stored: Mapping[str, StoredTensor]) -> list[Path]:
    return sorted({tensor.path for tensor in stored.values()})


def _total(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
