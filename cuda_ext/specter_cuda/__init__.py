"""Native copies and kernels behind plain pointers and byte counts; no torch, no Python headers."""

from specter_cuda.copy_thread import Completion, CopyThread
from specter_cuda.decode import OutType, decode_codes

__all__ = ["Completion", "CopyThread", "OutType", "decode_codes"]
