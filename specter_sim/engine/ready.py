"""Whether the engine's machine code is there, without compiling it to find out.

Compiling takes half a minute, loading a second. A mark beside the machine code says that it was
made by this interpreter's numba, for these files, on this machine.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from specter_sim.engine.compile import use_cache_folder

ENTRIES = "specter_sim.engine.entries"
COMPILE_S = 30.0  # on two slow cores


def is_ready() -> bool:
    """Whether the compiled engine starts without compiling."""
    return ENTRIES in sys.modules or _mark().exists()


def make_ready() -> None:
    """Compile the engine, or load what was compiled before, and leave the mark."""
    import_module(ENTRIES)
    mark = _mark()
    if not mark.exists() and mark.parent.is_dir():
        mark.touch()


def _mark() -> Path:
    """Named by all that numba compares before it uses machine code."""
    use_cache_folder()
    source = (Path(__file__).parent / "entries.py").stat()
    parts = (
        platform.python_version(),
        version("numba"),
        f"{source.st_mtime_ns:x}",
        platform.machine(),
        platform.node(),
    )
    return Path(os.environ["NUMBA_CACHE_DIR"]) / f"ready-{'-'.join(parts)}"
