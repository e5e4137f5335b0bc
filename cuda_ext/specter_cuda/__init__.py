"""Native copies and kernels behind plain pointers and byte counts; no torch, no Python headers."""

from specter_cuda.copy_thread import Completion, CopyThread

__all__ = ["Completion", "CopyThread"]
