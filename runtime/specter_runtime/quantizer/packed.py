"""A draft weight as it is kept: packed codes and FP16 scales, decoded when it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from specter_cuda import OutType, decode_codes
from specter_runtime.quantizer import base_code, code_bytes, int4_kernel, symmetric
from specter_runtime.quantizer.draft import DraftCode
from specter_traces import DraftKind

_OUT_TYPES: dict[torch.dtype, OutType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_BYTE_BITS = 8
_KERNEL_BITS = 4


@dataclass(frozen=True)
class PackedWeight:
    """One matrix [rows, width] of a draft, in the bytes it costs; groups run along a row.

    codes: uint8 [rows, bytes of a row], laid out by `code_bytes`; scales: FP16 [rows, groups];
    table: what each code stands for, in units of the scale (empty with 8 bits, where a code is a
    signed byte and stands for itself). An unquantized draft keeps the weight itself as `codes`, and
    no scales. kernel: torch's own product for these codes, where asked for.
    """

    code: DraftCode
    width: int
    codes: Tensor
    scales: Tensor
    table: tuple[float, ...]
    kernel: int4_kernel.Int4Kernel | None = None

    @classmethod
    def pack(cls, weight: Tensor, code: DraftCode) -> PackedWeight:
        """Quantize `weight` [rows, width] with `code` and pack it.

        Decoded to the type of `weight` it is, bit for bit, `code.draft_weight(weight)`. Raises
        ValueError for a weight that is not a matrix or not finite.
        """
        if weight.ndim != 2:
            raise ValueError(f"a packed weight is a matrix, got shape {tuple(weight.shape)}")
        weight = weight.detach()
        width = weight.shape[-1]
        if code.kind is None:
            no_scales = torch.empty(weight.shape[0], 0, dtype=torch.float16)
            return cls(code, width, weight.clone(), no_scales, ())
        places, scales, table = _quantized(weight, code)
        codes = code_bytes.pack(places, code.bits, code.group_size)
        return cls(code, width, codes, scales.contiguous(), table)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and width of the weight."""
        return self.codes.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales, and of the kernel's own copy if there is one."""
        copy = self.kernel.nbytes if self.kernel else 0
        return self.codes.nbytes + self.scales.nbytes + copy

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The weight that the draft computes with: a new tensor [rows, width]."""
        return self.decode_into(torch.empty(self.shape, dtype=dtype))

    def decode_into(self, out: Tensor) -> Tensor:
        """Write the weight into `out` [rows, width] and return it.

        `out` is contiguous, on the CPU, and FP32, BF16 or FP16; anything else is a ValueError.
        """
        if self.code.kind is None:
            return out.copy_(self.codes)
        if out.shape != self.shape or not out.is_contiguous() or out.device.type != "cpu":
            raise ValueError(f"needs a contiguous CPU tensor {self.shape}, got {_described(out)}")
        if out.dtype not in _OUT_TYPES:
            raise ValueError(f"decodes to FP32, BF16 or FP16, got {_described(out)}")
        rows, width = self.shape
        decode_codes(
            self.codes.data_ptr(),
            self.scales.data_ptr(),
            self.table,
            self.code.bits,
            rows,
            width,
            self.code.group_size,
            out.data_ptr(),
            _OUT_TYPES[out.dtype],
        )
        return out

    def with_kernel(self, dtype: torch.dtype) -> PackedWeight:
        """The same weight with torch's 4-bit kernel for inputs of `dtype`, if it has one for it.

        Costs the weight's bytes again. Symmetric codes of 4 bits only, and not every shape.
        """
        symmetric_4 = self.code.kind is DraftKind.SYMMETRIC and self.code.bits == _KERNEL_BITS
        if not symmetric_4 or not int4_kernel.accepts(*self.shape, self.code.group_size):
            return self
        kernel = int4_kernel.build(self._levels(), self.scales, self.code.group_size, dtype)
        return replace(self, kernel=kernel)

    def linear(self, x: Tensor) -> Tensor:
        """x [..., width] times the weight: [..., rows], by the kernel or by decoding."""
        if self.kernel is not None and self.kernel.dtype is x.dtype:
            return self.kernel(x)
        return linear(x, self.decode(x.dtype))

    def decode_slowly(self, dtype: torch.dtype) -> Tensor:
        """What `decode` must give, in plain torch: the definition, and what tests compare with."""
        if self.code.kind is None:
            return self.codes.to(dtype, copy=True)
        bits, size = self.code.bits, self.code.group_size
        if self.code.kind is DraftKind.SYMMETRIC:
            integers = symmetric.SymmetricCoded(bits, size, self._levels(), self.scales)
            return integers.decode(dtype)
        representatives = torch.tensor(self.table[: 2 ** (bits - 1)])
        base = base_code.BaseCoded(bits, size, self._places(), self.scales, representatives)
        return base.decode(dtype)

    def _places(self) -> Tensor:
        return code_bytes.unpack(self.codes, self.code.bits, self.code.group_size, self.width)

    def _levels(self) -> Tensor:
        return _signed(self._places(), self.code.bits)


def _quantized(weight: Tensor, code: DraftCode) -> tuple[Tensor, Tensor, tuple[float, ...]]:
    """Codes as uint8 [rows, width] below 2^bits, scales [rows, groups], and the codes' meaning."""
    bits, size = code.bits, code.group_size
    if code.kind is DraftKind.BASE:
        base = base_code.encode(weight, bits, size)
        magnitudes = base.representatives.tolist()
        return base.codes, base.scales, (*magnitudes, *(-each for each in magnitudes))
    integers = symmetric.encode(weight, bits, size)
    places = integers.codes.view(torch.uint8) & (2**bits - 1)
    if bits == _BYTE_BITS:
        return places, integers.scales, ()
    every = _signed(torch.arange(2**bits, dtype=torch.uint8), bits)
    return places, integers.scales, tuple(float(level) for level in every)


def _signed(places: Tensor, bits: int) -> Tensor:
    """Two's complement of `bits` bits as int8."""
    half = 2 ** (bits - 1)
    signed: Tensor = (places.to(torch.int16) ^ half) - half
    return signed.to(torch.int8)


def _described(tensor: Tensor) -> str:
    order = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}{order}"
