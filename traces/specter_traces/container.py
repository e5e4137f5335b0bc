"""Reading and writing trace files: safetensors, memory-mapped, distrustful of what it is given."""

from __future__ import annotations

import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as serialize

from specter_traces.columns import COLUMN_BY_NAME, COLUMNS
from specter_traces.errors import SpecterError, UsageError, shown
from specter_traces.files import refuse_irregular, write_atomic
from specter_traces.header import METADATA_KEY, Header
from specter_traces.trace import Trace
from specter_traces.validation import Problem, validate

_LENGTH_BYTES = 8
_LARGEST_HEADER_BYTES = 64 * 1024 * 1024
_NUMPY_TYPES = {
    "U8": "uint8",
    "U16": "uint16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
}


def load(path: str | os.PathLike[str], *, full: bool = False) -> Trace:
    """Return the trace in a file, its columns mapped, not read.

    Always checked: the file is whole, every column has the type and shape the header promises,
    offsets and ids lie in range. `full` checks every invariant (see `validate`), content hash
    included. Raises SpecterError with one line that names the file and the first problem,
    UsageError when there is no such file.
    """
    trace, problems = examine(path, full=full)
    _refuse(Path(path), problems)
    return trace


def examine(path: str | os.PathLike[str], *, full: bool = True) -> tuple[Trace, list[Problem]]:
    """Return the trace in a file and every problem that `validate` finds in it.

    Raises like `load` when the file cannot be read as a trace at all.
    """
    file = Path(path)
    data = _map(file)
    tensors, metadata, first_byte = _parse_header(file, data)
    if METADATA_KEY not in metadata:
        raise _bad(file, "it is a safetensors file of another kind, without a trace header")
    try:
        header = Header.from_json(metadata[METADATA_KEY])
    except SpecterError as error:
        raise _bad(file, str(error)) from None
    trace = _assemble(file, header, _columns(file, data, tensors, first_byte))
    return trace, validate(trace, thorough=full)


def save(trace: Trace, path: str | os.PathLike[str]) -> Trace:
    """Write a trace atomically and return it with its content hash.

    Raises SpecterError when the trace breaks a cheap invariant, UsageError when the folder
    cannot be written.
    """
    _refuse(Path(path), validate(trace.with_header(content_hash=""), thorough=False))
    if not trace.header.is_writable:
        raise UsageError(f"cannot write {path}: a name in its header is not valid text")
    sealed = trace.sealed()
    tensors = {name: np.ascontiguousarray(values) for name, values in sealed.columns().items()}
    content = serialize(tensors, metadata={METADATA_KEY: sealed.header.to_json()})
    write_atomic(path, content)
    return sealed


def _bad(file: Path, reason: str) -> SpecterError:
    return SpecterError(f"{file} is not a usable trace: {reason}")


def _refuse(file: Path, problems: list[Problem]) -> None:
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise _bad(file, f"{problems[0]}{more}")


def _map(file: Path) -> mmap.mmap:
    refuse_irregular(file)
    try:
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < _LENGTH_BYTES + 2:
                raise _bad(file, f"it holds {size} bytes; expected a safetensors file")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UsageError(f"no trace at {file}: give a file or the name of a bundled one") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read trace {file}: {error}") from None


def _parse_header(file: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, str], int]:
    """Return (tensor entries, metadata, offset of the first tensor byte)."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    available = len(data) - _LENGTH_BYTES
    if not 2 <= length <= min(available, _LARGEST_HEADER_BYTES):
        raise _bad(
            file,
            f"its header claims {length} bytes of the {available} there are; "
            "it is truncated or no safetensors file",
        )
    try:
        entries = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].decode())
    except (ValueError, RecursionError):
        raise _bad(file, "its header is not JSON; it is no safetensors file") from None
    if not isinstance(entries, dict):
        raise _bad(file, "its header is not a JSON object; it is no safetensors file")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(file, "its metadata is not a table of texts")
    return entries, metadata, _LENGTH_BYTES + length


def _columns(
    file: Path, data: mmap.mmap, tensors: dict[str, Any], first_byte: int
) -> dict[str, NDArray[Any]]:
    arrays, spans = {}, []
    for name, entry in tensors.items():
        if name not in COLUMN_BY_NAME:
            raise _bad(file, f"unknown column {name!r:.60}")
        dtype, shape, start, stop = _entry(file, name, entry)
        if stop > len(data) - first_byte:
            raise _bad(
                file,
                f"column {name} ends at byte {stop} of {len(data) - first_byte}; it is truncated",
            )
        spans.append((start, stop))
        try:
            arrays[name] = np.ndarray(shape, dtype, buffer=data, offset=first_byte + start)
        except (ValueError, OverflowError):
            raise _bad(file, f"column {name} claims the shape {shown(list(shape))}") from None
    _refuse_overlaps(file, sorted(spans), len(data) - first_byte)
    return arrays


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Return (numpy type, shape, first byte, end byte) of one tensor, all plausible."""
    try:
        dtype = _NUMPY_TYPES.get(entry["dtype"], str(entry["dtype"]))
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, start, stop)
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(numbers)
    except (TypeError, ValueError, KeyError):
        raise _bad(file, f"column {name} has a broken header entry") from None
    expected = COLUMN_BY_NAME[name].dtypes
    if dtype not in expected:
        raise _bad(file, f"column {name}: expected {' or '.join(expected)}, got {dtype:.20}")
    if stop - start != math.prod(shape) * np.dtype(dtype).itemsize:
        raise _bad(file, f"column {name}: {stop - start} bytes do not hold {dtype} {list(shape)}")
    return dtype, shape, start, stop


def _refuse_overlaps(file: Path, spans: list[tuple[int, int]], available: int) -> None:
    """Columns tile the data exactly, so that a file cannot hide or share bytes."""
    end = 0
    for start, stop in spans:
        if start != end:
            raise _bad(file, f"its columns leave a gap or overlap at byte {min(start, end)}")
        end = stop
    if end != available:
        raise _bad(file, f"{available - end} bytes follow its last column")


def _assemble(file: Path, header: Header, columns: dict[str, NDArray[Any]]) -> Trace:
    for column in COLUMNS:
        if column.required and column.name not in columns:
            raise _bad(file, f"column {column.name} is missing")
    return Trace(header=header, **columns)
