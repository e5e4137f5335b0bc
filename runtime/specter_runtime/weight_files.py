"""Reading safetensors files tensor by tensor, after checking that they say one consistent thing.

Every tensor is read into memory of its own, when it is asked for. Nothing is mapped: a file that
shrinks later cannot bring the process down, and no page is counted twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from specter_traces.errors import UsageError, printable, shown

INDEX = "model.safetensors.index.json"
"""Name of the file that says which shard holds which tensor."""

_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_HEADER_LIMIT_BYTES = 100_000_000  # as the format says
_AGAIN = "copy the checkpoint again"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Number types by the names that the format gives them."""


class Source(Protocol):
    """A tensor that can be read: its name, number type and shape are known before."""

    @property
    def name(self) -> str:
        """Name in the checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """Number type of what `read` gives."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what `read` gives."""

    @property
    def nbytes(self) -> int:
        """Bytes that `read` takes from the disk."""

    def read(self) -> Tensor:
        """The tensor, in memory of its own. UsageError when the file is not what it was."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file: where its bytes are and what they mean."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        data = torch.empty(self.nbytes, dtype=torch.uint8)
        self.read_into(data)
        return data.view(self.dtype).view(self.shape)

    def row(self, index: int) -> StoredTensor:
        """One entry along the first dimension, as a tensor of its own."""
        size = self.nbytes // self.shape[0]
        begin = self.begin + index * size
        return replace(self, shape=self.shape[1:], begin=begin, nbytes=size)

    def part(self, begin: int, end: int) -> StoredTensor:
        """Bytes `begin` to `end` of a row of bytes."""
        size = end - begin
        return replace(self, shape=(size,), begin=self.begin + begin, nbytes=size)

    def read_into(self, data: Tensor) -> None:
        """Read the tensor's bytes into `data`, uint8 [nbytes]."""
        rest = memoryview(data.numpy().data)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin)
                while rest:
                    got = file.readinto(rest)
                    if not got:
                        raise _broken(self.path, f"it ends inside {self.name}")
                    rest = rest[got:]
        except OSError as error:
            raise UsageError(f"cannot read {self.name}: {error}") from None


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, by name, from whichever files hold it.

    The index says which files; without one a single file, or a whole set of numbered shards. No
    tensor is read. UsageError when something is missing, twice, broken, or not safetensors.
    """
    index = folder / INDEX
    mapped = _read_index(index) if index.is_file() else None
    names = sorted(set(mapped.values())) if mapped is not None else _unindexed(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise UsageError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}: "
            f"{_AGAIN}"
        )
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        for tensor in read_header(folder / name):
            if tensor.name in tensors:
                first = tensors[tensor.name].path.name
                raise UsageError(
                    f"{folder} holds {tensor.name} twice, in {first} and in {name}: {_AGAIN}"
                )
            tensors[tensor.name] = tensor
    absent = sorted(set(mapped or ()) - tensors.keys())
    if absent:
        raise UsageError(
            f"{index} lists {printable(absent[0])}, which no weight file holds: {_AGAIN}"
        )
    return tensors


def read_header(path: Path) -> Iterator[StoredTensor]:
    """The tensors that a safetensors file says it holds, in file order, none of them read.

    UsageError when the header is no header, or its shapes, offsets and the file's size disagree.
    """
    try:
        header, start, size = _raw_header(path)
        _check_metadata(header.pop("__metadata__", {}))
        tensors = [_entry(path, name, entry, start) for name, entry in header.items()]
        tensors.sort(key=lambda tensor: (tensor.begin, tensor.nbytes))
        end = start
        for tensor in tensors:
            if tensor.begin != end:
                raise ValueError(
                    f"{printable(tensor.name)} does not start where its neighbour ends"
                )
            end += tensor.nbytes
        if end != size:
            raise ValueError(f"it should be {end} bytes long and is {size}")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise _broken(path, str(error).splitlines()[0]) from None
    yield from tensors


def header_text(path: Path) -> str:
    """The JSON header of a file that `read_header` accepts, as it is, padding included."""
    try:
        with path.open("rb") as file:
            return file.read(int.from_bytes(file.read(8), "little")).decode()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def _raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The JSON header, where the data starts, and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes does not fit a file of {size}")
        text = file.read(length).decode()
    header = json.loads(text, object_pairs_hook=_once)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, 8 + length, size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is listed twice")
    return result


def _check_metadata(metadata: Any) -> None:
    """Nothing in it matters here, but a file that breaks the format is not trusted."""
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"its metadata is {shown(metadata)}, not texts by name")


def _entry(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """One tensor's entry, checked on its own."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ValueError(f"{shown(name)} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{shown(name)} has number type {shown(dtype)}, which is not read here")
    if not _is_lengths(shape) or not _is_lengths(offsets) or len(offsets) != 2:
        raise ValueError(f"{shown(name)} has shape {shown(shape)} at {shown(offsets)}")
    begin, end = offsets
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise ValueError(f"{shown(name)} needs {nbytes} bytes and has {end - begin}")
    return StoredTensor(name, DTYPES[dtype], tuple(shape), path, start + begin, nbytes)


def _is_lengths(value: object) -> bool:
    return isinstance(value, list) and all(
        type(length) is int and 0 <= length < 2**63 for length in value
    )


def _broken(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no whole safetensors file ({why}): {_AGAIN}")


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        text = index.read_text(encoding="utf-8")
        files = json.loads(text, object_pairs_hook=_once)["weight_map"]
        names = dict(files.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{index} is no index of weights ({type(error).__name__}: {error}): {_AGAIN}"
        ) from None
    plain = all(isinstance(name, str) and Path(name).name == name for name in names.values())
    if not names or not plain:
        raise UsageError(f"{index} names no weight files of its folder: {_AGAIN}")
    return names


def _unindexed(folder: Path) -> list[str]:
    """The weight files of a folder without an index: one file, or every shard of a set."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise _no_weights(folder)
    if _SINGLE in names:
        return [_SINGLE]
    shards = [match for match in map(_SHARD.fullmatch, names) if match]
    if not shards:
        return names
    sets = {(match["stem"], int(match["count"])) for match in shards}
    if len(sets) > 1:
        raise UsageError(
            f"{folder} has no {INDEX} and shards of {len(sets)} sets: keep one, or add the index"
        )
    stem, count = next(iter(sets))
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _no_weights(folder: Path) -> UsageError:
    pickled = sorted(path.name for kind in _PICKLED for path in folder.glob(kind))
    if pickled:
        return UsageError(
            f"{folder} holds pickled weights ({pickled[0]}), which can run code when opened: "
            "convert them to safetensors first"
        )
    return UsageError(f"{folder} holds no weights: no .safetensors file is there")
