"""How much host memory loading a checkpoint takes at its peak, in checkpoints.

Writes a random checkpoint in the layout of Qwen3-MoE (one tensor a matrix an expert, in shards) to
a temporary folder, then loads it in fresh processes: with `open_checkpoint` and the expert store,
and with plain transformers for comparison. Printed is the largest resident set (anonymous memory
and file pages) above what the imports took, over the bytes of the weight files. Linux only.

    python benchmarks/load_memory.py --layers 28 --experts 64
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, EXPERT_WIDTH, VOCABULARY = 512, 256, 8192
HEADS, KV_HEADS, HEAD_WIDTH = 8, 2, 64

_LOAD = """
import json, sys, time
from pathlib import Path
import torch, transformers
from transformers import AutoModelForCausalLM
from specter_runtime.checkpoint import open_checkpoint
from specter_runtime.expert_store import ExpertStore
from specter_runtime.experts import install

def kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3_moe", num_hidden_layers=1,
    num_experts=2, vocab_size=8, hidden_size=8, moe_intermediate_size=8, intermediate_size=8,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4))
Path("/proc/self/clear_refs").write_text("5")
before = kib("VmRSS")
began = time.perf_counter()
if sys.argv[2] == "specter":
    checkpoint = open_checkpoint(sys.argv[1])
    opened = kib("VmHWM")
    store = ExpertStore.take(install(checkpoint.model))
    store.verify()
else:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
    opened = kib("VmHWM")
    total = sum(float(value.sum()) for value in model.parameters())
print(json.dumps({"opened_kib": opened - before, "peak_kib": kib("VmHWM") - before,
    "anonymous_kib": kib("RssAnon"), "load_s": time.perf_counter() - began}))
"""


def main() -> None:
    """Write, load twice, print one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--shards", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stored_bytes = write(Path(folder), arguments.layers, arguments.experts, arguments.shards)
        print(
            f"{stored_bytes / 1e9:.2f} GB, {arguments.layers} layers of {arguments.experts} "
            f"experts, {arguments.shards} shards, BF16, torch {torch.__version__}"
        )
        for way in ("specter", "transformers"):
            found = measure(folder, way)
            peak, opened = (found[key] * 1024 / stored_bytes for key in ("peak_kib", "opened_kib"))
            print(
                f"{way:12}  peak {peak:.3f} x checkpoint (model opened: {opened:.3f} x)  "
                f"{found['load_s']:.1f} s"
            )


def measure(folder: str, way: str) -> dict[str, float]:
    """One load in a process of its own."""
    command = [sys.executable, "-c", _LOAD, folder, way]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def write(folder: Path, layers: int, experts: int, shards: int) -> int:
    """A random checkpoint; the bytes of its weight files."""
    torch.manual_seed(0)
    names: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        first, last = shard * layers // shards, (shard + 1) * layers // shards
        tensors = dict(
            pair for layer in range(first, last) for pair in layer_tensors(layer, experts)
        )
        if shard == 0:
            tensors |= dict(outer_tensors())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(layers, experts)))
    os.sync()
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def config(layers: int, experts: int) -> dict[str, object]:
    """What Qwen3-MoE needs to know."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "moe_intermediate_size": EXPERT_WIDTH,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_WIDTH,
        "tie_word_embeddings": True,
    }


def outer_tensors() -> Iterator[tuple[str, Tensor]]:
    """Embedding and last norm."""
    yield "model.embed_tokens.weight", random(VOCABULARY, WIDTH)
    yield "model.norm.weight", random(WIDTH)


def layer_tensors(layer: int, experts: int) -> Iterator[tuple[str, Tensor]]:
    """One decoder layer, one tensor for each matrix of each expert."""
    name = f"model.layers.{layer}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.{norm}.weight", random(WIDTH)
    for norm in ("q_norm", "k_norm"):
        yield f"{name}.self_attn.{norm}.weight", random(HEAD_WIDTH)
    for matrix, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield f"{name}.self_attn.{matrix}_proj.weight", random(heads * HEAD_WIDTH, WIDTH)
    yield f"{name}.self_attn.o_proj.weight", random(WIDTH, HEADS * HEAD_WIDTH)
    yield f"{name}.mlp.gate.weight", random(experts, WIDTH)
    for expert in range(experts):
        for matrix in ("gate", "up"):
            weight = random(EXPERT_WIDTH, WIDTH)
            yield f"{name}.mlp.experts.{expert}.{matrix}_proj.weight", weight
        yield f"{name}.mlp.experts.{expert}.down_proj.weight", random(WIDTH, EXPERT_WIDTH)


def random(*shape: int) -> Tensor:
    """Small BF16 weights."""
    return (torch.randn(shape) * 0.02).bfloat16()


if __name__ == "__main__":
    main()
