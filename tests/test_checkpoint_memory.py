"""Loading takes little more host memory than the checkpoint's bytes, at every moment."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from toy_checkpoints import TOYS, Toy, write

from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install
from specter_runtime.freed_memory import give_back

LARGE = Toy(
    "qwen3_moe",
    32,
    8,
    2,
    settings={
        "num_hidden_layers": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 16,
    },
)
"""100 MB, so that what Python and torch take on the way does not matter."""

STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@pytest.mark.skipif(not STATUS.exists(), reason="the system tells no peak of resident memory")
def test_experts_are_never_held_twice(tmp_path: Path) -> None:
    folder = write(LARGE, tmp_path / "large")
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    warm = write(TOYS["qwen3-moe"], tmp_path / "warm")
    ExpertStore.take(install(open_checkpoint(str(warm)).model))
    gc.collect()
    give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    except OSError:
        pytest.skip("the system does not let the peak be reset")
    before = status_bytes("VmRSS")
    checkpoint = open_checkpoint(str(folder))
    opened = status_bytes("VmHWM") - before
    store = ExpertStore.take(install(checkpoint.model))
    peak = status_bytes("VmHWM") - before
    assert store.nbytes > 0.9 * stored > 90e6
    assert opened < 1.15 * stored
    assert peak < 1.15 * stored
