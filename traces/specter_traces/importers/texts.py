"""Reading the text and array files that logs come in, with one clear refusal each."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_traces.errors import UsageError
from specter_traces.files import refuse_irregular
from specter_traces.importers.recorded import refusal

BROKEN_ARRAYS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    AttributeError,
    TypeError,
    OverflowError,
    MemoryError,  # a header that claims more than there is memory
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What numpy raises for array files that are damaged or none."""


def read_text(file: Path) -> str:
    """Return the UTF-8 text of a file. Raises UsageError when it is not there."""
    refuse_irregular(file)
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(file, f"it cannot be read as text ({error})") from None


def parse_json(file: Path, text: str, where: str = "") -> Any:
    """Return a JSON document; `where` stands in front of the complaint."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(file, f"{where}not JSON ({error})") from None


def read_json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of every line that is not empty."""
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        row = parse_json(file, line, f"line {number}: ")
        if not isinstance(row, dict):
            raise refusal(file, f"line {number}: expected a JSON object")
        yield number, row


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a .npz file, by name, never unpickling."""
    refuse_irregular(file)
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except FileNotFoundError:
        raise UsageError(f"no file {file}") from None
    except BROKEN_ARRAYS as error:
        raise refusal(file, f"it is truncated or no .npz file ({error})") from None


def grid(file: Path, where: str, values: list[Any]) -> NDArray[Any]:
    """Return nested lists as an array, refusing rows of different length."""
    try:
        return np.array(values)
    except ValueError:
        raise refusal(file, f"{where}: rows differ in length (fewer than k ids in a row)") from None


def half(file: Path, where: str, values: NDArray[Any]) -> NDArray[np.float16]:
    """Return weights as 16-bit numbers; what is beyond them becomes infinite, and is refused."""
    if values.dtype.kind not in "fiu":
        raise refusal(file, f"{where}: weights are {values.dtype}, not numbers")
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
