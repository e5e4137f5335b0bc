"""Which functions the compiled engine is made of, and where its machine code is kept.

Rules stay plain Python wherever they live. Every function of the rule modules is registered with
numba, so that compiled code may call it. Machine code is cached per content of those files: numba
itself would not notice that a function called from another file has changed.
"""

from __future__ import annotations

import hashlib
import os
import types
from pathlib import Path

from specter_sim import bound, replay
from specter_sim.engine import kernel, rules
from specter_sim.hardware import costs
from specter_sim.offload import residency, schedule
from specter_sim.policies import (
    depth,
    eviction,
    governor,
    oracle_prefetch,
    paper_planner,
    plan,
    prefetch,
    state,
)

MODULES = (
    state,
    eviction,
    plan,
    prefetch,
    paper_planner,
    oracle_prefetch,
    depth,
    governor,
    residency,
    schedule,
    costs,
    bound,
    replay,
    rules,
    kernel,
)


def register() -> None:
    """Let compiled code call every function of the modules above."""
    from numba.extending import register_jitable

    for module in MODULES:
        for function in functions_of(module):
            register_jitable(function)


def functions_of(module: types.ModuleType) -> list[types.FunctionType]:
    """The functions a module defines itself, in order."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    ]


def use_cache_folder() -> None:
    """Point numba to the machine code of exactly these sources, unless the user chose a folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    for module in MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = root / "specter" / f"numba-{digest.hexdigest()[:16]}"
    os.environ.setdefault("NUMBA_CACHE_DIR", str(folder))
