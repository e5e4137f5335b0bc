"""How long a draft's matrix product takes: decode and multiply, against torch's low-bit kernels.

`python benchmarks/draft_kernels.py [--threads N] [--repeats N] [--json]`. For each weight shape and
number of tokens it times, in BF16: F.linear with the weight decoded beforehand; packed weights
decoded into one scratch tensor and multiplied (base4, base2, int4, int8); and torch's own kernels,
`_weight_int4pack_mm_for_cpu` (groups like ours, scales in BF16) and `_weight_int8pack_mm` (one
scale a row, no groups). Rounds visit every way in turn, many matrices each, so that all meet the
same load; figures are medians of rounds, ratios are taken inside a round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor
from torch.nn.functional import linear

from specter_runtime.quantizer import parse
from specter_runtime.quantizer.packed import PackedWeight

SHAPES = {"tiny-moe gate_up": (128, 256), "tiny-moe down": (256, 64), "larger": (2816, 2048)}
TOKENS = (1, 4)
GROUP_SIZE = 64
CODES = ("base4", "base2", "int4", "int8")
REFERENCE = "base4, decode + linear"
ROUND_BYTES = 64 * 2**20
"""BF16 bytes of the matrices of one round: more than the last cache holds, as experts are."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one product, and its median share of the reference's of the same round."""

    shape: str
    tokens: int
    way: str
    seconds: float
    ratio: float


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="time the products of a draft's packed weights")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    timings = [
        timing for name, shape in SHAPES.items() for timing in measure(name, shape, options.repeats)
    ]
    conditions: dict[str, str | int] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {options.threads} threads",
        "torch": torch.__version__,
        "group_size": GROUP_SIZE,
    }
    if options.json:
        print(json.dumps({**conditions, "timings": [vars(timing) for timing in timings]}))
    else:
        print_table(conditions, timings)


def print_table(conditions: dict[str, str | int], timings: list[Timing]) -> None:
    """For people."""
    print(", ".join(f"{key} {value}" for key, value in conditions.items()))
    for timing in timings:
        print(
            f"{timing.shape:17} T={timing.tokens}  {timing.way:24} "
            f"{timing.seconds * 1e6:9.1f} us  {timing.ratio:6.2f} x"
        )


def measure(name: str, shape: tuple[int, int], repeats: int) -> list[Timing]:
    """Time every way on weights of one shape."""
    rows, width = shape
    number = max(3, min(200, ROUND_BYTES // (2 * rows * width)))
    weights = [torch.randn(rows, width).bfloat16() * 0.05 for _ in range(number)]
    ways = {way: [make(weight) for weight in weights] for way, make in makers(shape).items()}
    timings = []
    for tokens in TOKENS:
        x = torch.randn(tokens, width).bfloat16()
        rounds = [
            {way: once(products, x) for way, products in ways.items()} for _ in range(repeats)
        ]
        for way in ways:
            seconds = statistics.median(each[way] for each in rounds)
            ratio = statistics.median(each[way] / each[REFERENCE] for each in rounds)
            timings.append(Timing(name, tokens, way, seconds, ratio))
    return timings


def each_way_once(ways: dict[str, list[Product]], x: Tensor) -> dict[str, float]:
    """One round: seconds a product, by way."""
    return {way: once(products, x) for way, products in ways.items()}


def once(products: list[Product], x: Tensor) -> float:
    """Seconds a product, over all of a way's matrices."""
    products[0](x)
    started = time.perf_counter()
    for product in products:
        product(x)
    return (time.perf_counter() - started) / len(products)


def makers(shape: tuple[int, int]) -> dict[str, Callable[[Tensor], Product]]:
    """What turns a weight into a product, by way."""
    scratch = torch.empty(shape, dtype=torch.bfloat16)
    ours = {f"{code}, decode + linear": packed_maker(code, scratch) for code in CODES}
    return {
        "decoded beforehand": plain,
        **ours,
        "torch int4 kernel": torch_int4,
        "torch int8 kernel": torch_int8,
    }


def plain(weight: Tensor) -> Product:
    """The weight as it is."""
    return lambda x: linear(x, weight)


def packed_maker(name: str, scratch: Tensor) -> Callable[[Tensor], Product]:
    """Packed weights that are decoded into `scratch` at every use."""

    def make(weight: Tensor) -> Product:
        packed = PackedWeight.pack(weight, parse(name, GROUP_SIZE))
        return lambda x: linear(x, packed.decode_into(scratch))

    return make


def torch_int4(weight: Tensor) -> Product:
    """Torch's kernel of 4 bits, as packed weights use it."""
    packed = PackedWeight.pack(weight, parse("int4", GROUP_SIZE)).with_kernel(weight.dtype)
    if packed.kernel is None:
        raise AssertionError(f"torch has no 4-bit kernel for shape {tuple(weight.shape)}")
    return checked(weight, packed.kernel, 0.2)


def torch_int8(weight: Tensor) -> Product:
    """Torch's kernel of 8 bits: one scale for a whole row."""
    scales = weight.float().abs().amax(-1) / 127
    codes = (weight.float() / scales.unsqueeze(-1)).round().to(torch.int8)
    in_type = scales.bfloat16()
    product = torch.ops.aten._weight_int8pack_mm
    return checked(weight, lambda x: product(x, codes, in_type), 0.03)


def checked(weight: Tensor, product: Product, tolerance: float) -> Product:
    """The product itself, if it multiplies by about `weight`."""
    x = torch.randn(3, weight.shape[1]).bfloat16()
    exact = linear(x.float(), weight.float())
    error = float((product(x).float() - exact).norm() / exact.norm())
    if error > tolerance:
        raise AssertionError(f"a kernel is used wrongly: relative error {error:.3f}")
    return product


if __name__ == "__main__":
    main()
