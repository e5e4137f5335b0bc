"""Native copies and kernels behind plain pointers and byte counts; no torch, no Python headers."""

from specter_cuda.copy_thread import Completion, CopyThread
from specter_cuda.decode import OutType, decode_codes
from specter_cuda.expert_code import (
    EXPONENT_PLANE_BITS,
    CodedMatrix,
    ExpandOutcome,
    WeightType,
    compress_expert,
    expand_expert,
)

__all__ = [
    "EXPONENT_PLANE_BITS",
    "CodedMatrix",
    "Completion",
    "CopyThread",
    "ExpandOutcome",
    "OutType",
    "WeightType",
    "compress_expert",
    "decode_codes",
    "expand_expert",
]
