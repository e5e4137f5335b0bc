"""A draft weight in the layout of torch's 4-bit kernel, multiplied by without being decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from specter_runtime.quantizer.int4_kernel import Int4Kernel
from specter_runtime.quantizer.packed import PackedWeight


class KernelWeight:
    """Stands for a weight in `linear(x, weight)`, or in `x @ weight` where it is transposed.

    Anything else that is asked of it is a TypeError.
    """

    def __init__(self, kernel: Int4Kernel) -> None:
        self._kernel = kernel

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Tensor:
        """The product of the first argument and this weight."""
        x, weight, *bias = args
        if func not in _PRODUCTS or not isinstance(weight, cls) or kwargs:
            raise TypeError(f"a weight in kernel form is only multiplied by, not used in {func}")
        product = weight._kernel(x)
        return product + bias[0] if bias and bias[0] is not None else product


def in_kernel_form(packed: PackedWeight, dtype: torch.dtype) -> PackedWeight | Int4Kernel:
    """The same weight in the kernel's layout alone, where torch has a kernel for it."""
    kernel = packed.with_kernel(dtype).kernel
    return packed if kernel is None else kernel


_PRODUCTS = (linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
