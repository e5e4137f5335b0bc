"""What a coded checkpoint's file says of itself: the JSON text in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specter_runtime.codec import BaseName, Coding
from specter_runtime.codec.coding import FORMATS
from specter_runtime.weight_files import header_text
from specter_traces.errors import SpecterError, UsageError, shown

METADATA_KEY = "specter_coded"
FORMAT_VERSION = 1

_DTYPES = {str(form.dtype).removeprefix("torch."): form.dtype for form in FORMATS}


class CodedMatrix(NamedTuple):
    """One matrix of every expert: `rows` of `width` inputs. shape: as the loop wants it."""

    name: str
    shape: tuple[int, ...]
    rows: int
    width: int


class CodedLayerFacts(NamedTuple):
    """A layer: the name of its experts module, and what its experts are like."""

    name: str
    experts: int
    matrices: tuple[CodedMatrix, ...]


class Origin(NamedTuple):
    """Where a tensor of the original lies: rows `first` and on of a matrix, maybe transposed.

    With `expert` None it holds these of every expert of the layer.
    """

    name: str
    layer: int
    expert: int | None
    matrix: str
    first: int
    rows: int
    transposed: bool


@dataclass(frozen=True)
class CodedHeader:
    """Everything about a coded file that is not a tensor.

    `dtype`: of the coded weights; `stored_dtype`: of the original's, another where they were
    converted. `files`: the header of each original weight file, as text; `index`: the text of the
    original's index, empty without one.
    """

    base: BaseName
    group_size: int
    dtype: str
    stored_dtype: str
    layers: tuple[CodedLayerFacts, ...]
    origins: tuple[Origin, ...]
    files: dict[str, str]
    index: str
    version: int = FORMAT_VERSION

    @property
    def coding(self) -> Coding:
        """How the experts are coded."""
        return Coding(self.base, self.group_size)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Number type of the coded weights."""
        return _DTYPES[self.dtype]

    def text(self) -> str:
        """The header as it is stored."""
        return json.dumps(asdict(self))


def read_coded_header(path: Path) -> CodedHeader:
    """The header of a coded file, whose tensors were found to be whole.

    UsageError for a file that is none, or of another version.
    """
    metadata = json.loads(header_text(path)).get("__metadata__", {})
    try:
        told = json.loads(metadata[METADATA_KEY])
        version = told["version"]
        if version == FORMAT_VERSION:
            return _header(told)
    except (ValueError, LookupError, TypeError, RecursionError, SpecterError) as error:
        raise UsageError(
            f"{path} is no file of coded experts ({type(error).__name__}: {error}): encode the "
            "checkpoint again"
        ) from None
    raise UsageError(
        f"{path} has format version {shown(version)}, this specter reads {FORMAT_VERSION}: encode "
        "the checkpoint again"
    )


def _header(told: Mapping[str, Any]) -> CodedHeader:
    header = CodedHeader(
        told["base"],
        int(told["group_size"]),
        str(told["dtype"]),
        str(told["stored_dtype"]),
        tuple(_layer(*each) for each in told["layers"]),
        tuple(Origin(*each) for each in told["origins"]),
        {str(name): str(text) for name, text in told["files"].items()},
        str(told["index"]),
    )
    if header.dtype not in _DTYPES or header.coding.draft_code is None:
        raise ValueError(f"experts of {shown(header.dtype)} with base {shown(header.base)}")
    _check_origins(header)
    return header


def _layer(name: str, experts: int, matrices: list[list[Any]]) -> CodedLayerFacts:
    if type(experts) is not int or experts < 1 or not matrices:
        raise ValueError(f"{shown(name)} has {shown(experts)} experts")
    read = [CodedMatrix(each[0], tuple(each[1]), each[2], each[3]) for each in matrices]
    for matrix in read:
        lengths = (*matrix.shape, matrix.rows, matrix.width)
        if len(matrix.shape) != 2 or any(type(n) is not int or n < 1 for n in lengths):
            raise ValueError(f"{shown(name)} has a matrix {shown(matrix)}")
    return CodedLayerFacts(name, experts, tuple(read))


def _check_origins(header: CodedHeader) -> None:
    """Every original tensor must lie inside a matrix that is there."""
    for origin in header.origins:
        facts = header.layers[origin.layer]
        matrix = {each.name: each for each in facts.matrices}[origin.matrix]
        inside = 0 <= origin.first < origin.first + origin.rows <= matrix.rows and origin.layer >= 0
        if not inside or not (origin.expert is None or 0 <= origin.expert < facts.experts):
            raise ValueError(f"{shown(origin.name)} lies outside of its layer")
