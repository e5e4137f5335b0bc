"""The compiled library beside this file, opened once; its functions release the GIL."""

from __future__ import annotations

import ctypes
from pathlib import Path

PATH = Path(__file__).with_name("specter_native.so")


def open_library(path: Path) -> ctypes.CDLL:
    """The compiled library at `path`; ImportError that says how to build it when it cannot load."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"specter's native library is not built ({error}): "
            "install a C++17 compiler and run pip install again in the root of the source tree"
        ) from error


LIBRARY = open_library(PATH)
