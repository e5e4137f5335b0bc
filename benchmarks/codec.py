"""How many bits coded experts take and how fast one core encodes and expands them.

`python benchmarks/codec.py [--repeats N] [--checkpoint DIR] [--json]`. Weights are BF16: Gaussian,
Student-t with 4 degrees of freedom, and matrices of a checkpoint's experts (tiny-moe's, unless
another folder is given). Bits a weight are those of the whole refinement, header and all; `base`
counts codes and scales. Speeds are bytes of BF16 weights by processor time of one thread, medians
of repeats in which every coding takes its turn: `expand`, `encode` (base, refinement, verification,
checksum). A matrix is larger than the second-level cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import specter_runtime
from specter_runtime.codec import BaseName, Coding, encode, expand_into

SHAPE = (704, 2048)
BASES: tuple[BaseName | None, ...] = ("base4", "base3", "base2", "int8", None)
GROUP_SIZES = (32, 64, 128)
SLOW_ROWS = 64
"""The grid of an 8-bit draft is searched for, which takes long: fewer rows."""


@dataclass(frozen=True)
class Row:
    """One coding of one weight: bits a weight, GB/s of BF16, medians."""

    weights: str
    base: str
    group_size: int
    refinement_bits: float
    share: float
    base_bits: float
    expand_gb_per_s: float
    encode_gb_per_s: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="bits and speed of coded experts")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--checkpoint", type=Path, default=bundled_model())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights = synthetic() | {options.checkpoint.name: expert_rows(options.checkpoint)}
    rows = [row for name, weight in weights.items() for row in measure(name, weight, options)]
    if options.json:
        print(json.dumps({"conditions": conditions(options), "rows": [asdict(r) for r in rows]}))
        return
    print(conditions(options))
    print(
        "weights        base   group  refinement bits (share)  base bits  expand GB/s  encode GB/s"
    )
    for row in rows:
        print(
            f"{row.weights:14} {row.base:6} {row.group_size:5}  {row.refinement_bits:10.3f} "
            f"({row.share:.4f})  {row.base_bits:13.3f} {row.expand_gb_per_s:12.2f} "
            f"{row.encode_gb_per_s:12.2f}"
        )


def measure(name: str, weight: Tensor, options: argparse.Namespace) -> list[Row]:
    """Every coding of one weight."""
    codings = [Coding(base, size) for base in BASES for size in GROUP_SIZES]
    return [measured(name, weight, coding, options.repeats) for coding in codings]


def measured(name: str, weight: Tensor, coding: Coding, repeats: int) -> Row:
    """One row of the table."""
    if coding.base == "int8":
        weight = weight[:SLOW_ROWS].contiguous()
    coded, out = encode(weight, coding), torch.empty_like(weight)
    expand_s = median_s(lambda: expand_into(coded.base, coded.refinement, out), repeats)
    encode_s = median_s(lambda: encode(weight, coding), 1 if coding.base == "int8" else repeats)
    bits = 8 * len(coded.refinement) / weight.numel()
    return Row(
        name,
        coding.base or "none",
        coding.group_size,
        bits,
        len(coded.refinement) / weight.nbytes,
        8 * coded.base.nbytes / weight.numel() if coded.base else 0.0,
        weight.nbytes / expand_s / 1e9,
        weight.nbytes / encode_s / 1e9,
    )


def median_s(action: Callable[[], object], repeats: int) -> float:
    """Median processor seconds of one call, after a first one."""
    action()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        action()
        times.append(time.process_time() - began)
    return statistics.median(times)


def synthetic() -> dict[str, Tensor]:
    """Gaussian and heavy-tailed weights."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn((5, *SHAPE), generator=generator)
    heavy = normal[0] / normal[1:].square().mean(0).sqrt()
    return {"gaussian": (normal[0] * 0.02).bfloat16(), "student-t(4)": (heavy * 0.02).bfloat16()}


def expert_rows(folder: Path) -> Tensor:
    """The widest expert matrices, stacked until they are as large as the synthetic weights."""
    matrices: list[Tensor] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = [name for name in tensors.keys() if ".experts." in name]  # noqa: SIM118
            chosen = names[:: max(len(names) // 256, 1)]
            matrices += [tensors.get_tensor(name).bfloat16() for name in chosen]
    width = max(matrix.shape[-1] for matrix in matrices)
    same = [matrix.reshape(-1, width) for matrix in matrices if matrix.shape[-1] == width]
    return torch.cat(same)[: SHAPE[0] * SHAPE[1] // width].contiguous()


def bundled_model() -> Path:
    """The folder of the model that comes with the runtime."""
    return Path(specter_runtime.__file__).parent / "models" / "tiny-moe"


def conditions(options: argparse.Namespace) -> str:
    """What the figures depend on."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, one thread, "
        f"torch {torch.__version__}, BF16, medians of {options.repeats}"
    )


if __name__ == "__main__":
    main()
