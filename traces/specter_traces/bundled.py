"""The traces that come with the package."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from specter_traces.container import load
from specter_traces.errors import UsageError
from specter_traces.files import refuse_irregular
from specter_traces.trace import Trace

_SUFFIX = ".safetensors"
_FAMILIES = {"tiny-moe": "tiny-moe-base4"}
"""Names of models that mean one of their traces."""


def _folder() -> Path:
    # The wheel is installed unpacked; a memory map needs a real file in any case.
    return Path(str(resources.files("specter_traces").joinpath("data")))


def bundled_names() -> list[str]:
    """Return the names `bundled` knows, sorted."""
    return sorted(path.stem for path in _folder().glob(f"*{_SUFFIX}"))


def bundled(name: str) -> Trace:
    """Return a bundled trace, memory-mapped. Raises UsageError naming the nearest name."""
    return load(_bundled_file(name))


def _bundled_file(name: str) -> Path:
    names = bundled_names()
    name = _FAMILIES.get(name, name)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"
        raise UsageError(f"no file and no bundled trace {name!r}; {hint}")
    return _folder() / f"{name}{_SUFFIX}"


def find_trace(name_or_path: str) -> Path:
    """Return the file of a bundled trace by its name or its model's, else the path itself.

    Raises UsageError when a plain word is neither a bundled name nor a file.
    """
    if name_or_path in (*_FAMILIES, *bundled_names()):
        return _bundled_file(name_or_path)
    path = Path(name_or_path)
    refuse_irregular(path)
    plain_word = not path.suffix and len(path.parts) == 1
    if plain_word and not path.exists():
        return _bundled_file(name_or_path)
    return path


def open_trace(name_or_path: str) -> Trace:
    """Return a bundled trace by its name, else the trace in a file (see `find_trace`)."""
    return load(find_trace(name_or_path))
