"""Writing safetensors files tensor by tensor: memory holds one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from specter_runtime.weight_files import DTYPES
from specter_traces.errors import SpecterError
from specter_traces.files import write_atomic

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT_BYTES = 8


class Output(NamedTuple):
    """A tensor to be written: `read` gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_weights(path: Path, outputs: Sequence[Output], metadata: Mapping[str, str]) -> Path:
    """A safetensors file of these tensors; it appears when it is whole."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    # Those of wide numbers come first: then each starts at a multiple of its number's size.
    ordered = sorted(outputs, key=lambda each: -each.dtype.itemsize)
    end = 0
    for each in ordered:
        begin, end = end, end + each.nbytes
        told = {"dtype": _NAMES[each.dtype], "shape": list(each.shape)}
        header[each.name] = told | {"data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text.encode()) % _ALIGNMENT_BYTES)
    return write_under_header(path, text, ordered)


def write_under_header(path: Path, header: str, outputs: Iterable[Output]) -> Path:
    """A safetensors file with this header, and the tensors in the order that it says.

    SpecterError for a tensor that is not as announced.
    """

    def write(file: BinaryIO) -> None:
        text = header.encode()
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for each in outputs:
            tensor = each.read().contiguous()
            if (tensor.dtype, tuple(tensor.shape)) != (each.dtype, each.shape):
                raise SpecterError(f"{each.name} became {tensor.dtype} {list(tensor.shape)}")
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy().data))

    return write_atomic(path, write)
