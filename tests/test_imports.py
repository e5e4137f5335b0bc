"""The import rules, checked by machine, and the claim that the simulator needs no torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
for name in ("specter_sim", "specter_traces"):
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def loaded_modules(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_simulator_and_the_traces_never_import_torch() -> None:
    loaded = loaded_modules(IMPORT_EVERYTHING)
    assert {"specter_sim.sim.run", "specter_sim.cli.sweep", "specter_traces.synthesize"} <= loaded
    heavy = {"torch", "transformers", "tokenizers", "specter_runtime", "specter_cuda"}
    assert not heavy & {name.partition(".")[0] for name in loaded}


def test_a_whole_run_never_imports_torch() -> None:
    run = "import sys; sys.argv = ['specter-sim', 'run', '--tokens', '16']\n"
    code = run + (
        "from specter_sim.cli import main\n"
        "try: main()\n"
        "except SystemExit as exit: assert not exit.code, exit.code\n"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    assert "torch" not in loaded_modules(code)


def test_help_loads_neither_numbers_nor_pictures() -> None:
    code = (
        "import sys; sys.argv = ['specter-sim', '--help']\n"
        "from specter_sim.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import json; print(); print(json.dumps(sorted(sys.modules)))"
    )
    slow = {"numpy", "scipy", "matplotlib", "simpy", "pydantic", "rich"}
    assert not slow & loaded_modules(code)


# An editable install finds the packages where they were installed from, before any path is asked.
LINT_THIS_FOLDER = """
import sys
sys.meta_path[:] = [
    finder for finder in sys.meta_path
    if getattr(finder, "__module__", "").startswith("_frozen_importlib")
]
sys.argv = ["lint-imports", "--no-cache"]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("importlinter", reason="needs import-linter")
    paths = [str(folder / name) for name in ("", "traces", "runtime", "cuda_ext")]
    return subprocess.run(
        [sys.executable, "-c", LINT_THIS_FOLDER],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )


def test_the_import_contracts_hold(checkout: Path) -> None:
    done = lint_imports(checkout)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("specter_sim/policies/eviction.py", "from specter_sim.sim import simulate"),
        ("specter_sim/units.py", "import specter_sim.config"),
        ("specter_sim/report/rows.py", "import torch"),
        ("traces/specter_traces/errors.py", "import specter_sim"),
        ("specter_sim/types.py", "import specter_cuda"),
        ("cuda_ext/specter_cuda/library.py", "import specter_traces"),
    ],
)
def test_a_forbidden_import_is_caught(
    checkout: Path, tmp_path: Path, module: str, line: str
) -> None:
    for name in ("specter_sim", "traces", "runtime", "cuda_ext"):
        ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
        shutil.copytree(checkout / name, tmp_path / name, ignore=ignored)
    shutil.copy(checkout / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout
