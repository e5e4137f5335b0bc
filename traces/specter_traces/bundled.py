"""The traces that come with the package."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from specter_traces.container import load
from specter_traces.errors import UsageError
from specter_traces.trace import Trace

_SUFFIX = ".safetensors"


def _folder() -> Path:
    # The wheel is installed unpacked; a memory map needs a real file in any case.
    return Path(str(resources.files("specter_traces").joinpath("data")))


def bundled_names() -> list[str]:
    """Return the names `bundled` knows, sorted."""
    return sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}"))


def bundled(name: str) -> Trace:
    """Return a bundled trace, memory-mapped. Raises UsageError naming the nearest name."""
    names = bundled_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise UsageError(f"no bundled trace {name!r}; {hint}")
    return load(_folder() / f"{name}{_SUFFIX}")


def open_trace(name_or_path: str) -> Trace:
    """Return a bundled trace by its name, else the trace in a file.

    Raises UsageError when there is neither.
    """
    looks_like_name = not Path(name_or_path).suffix and "/" not in name_or_path
    if name_or_path in bundled_names() or (looks_like_name and not Path(name_or_path).exists()):
        return bundled(name_or_path)
    return load(name_or_path)
