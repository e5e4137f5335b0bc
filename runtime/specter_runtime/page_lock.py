"""Keeping host memory from being paged out, as far as the system allows.

Containers and WSL refuse to lock more than some limit. That is no failure: what could be locked
stays locked, the caller is told how much that is, and runs with it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

from torch import Tensor

_PIECE_BYTES = 16 << 20
"""Bytes locked in one call. A refusal halves the piece, down to one page, so the limit is met."""


class PageLock:
    """Pages of this process locked in memory; unlocked by `close()`. Needs libc's `mlock`."""

    def __init__(self) -> None:
        """Nothing is locked yet."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pieces: list[tuple[int, int]] = []

    @property
    def locked_bytes(self) -> int:
        """Bytes that are locked now, whole pages."""
        return sum(size for _, size in self._pieces)

    def lock(self, address: int, size_bytes: int) -> int:
        """Lock the memory at `address`, from the front until the system refuses; bytes locked.

        `address` must start a page; a last page that is only partly asked for counts whole.
        """
        before = self.locked_bytes
        for start, size in _pieces(address, size_bytes):
            if not self._lock_piece(start, size):
                break
        return self.locked_bytes - before

    def lock_all(self, memories: Sequence[Tensor], limit_bytes: int | None) -> None:
        """Lock tensors that start a page, one after the other, up to `limit_bytes` or a refusal."""
        for memory in memories:
            wanted = memory.nbytes
            if limit_bytes is not None:
                rest = (limit_bytes - self.locked_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
                wanted = min(wanted, rest)
            if self.lock(memory.data_ptr(), wanted) < wanted:
                return

    def close(self) -> None:
        """Unlock everything. The memory must still be mapped; a second call does nothing."""
        while self._pieces:
            address, size = self._pieces.pop()
            self._call("munlock", address, size)

    def _lock_piece(self, address: int, size: int) -> bool:
        """Lock one piece or the largest front of it that is allowed; True when it is whole."""
        end, step = address + size, size
        while address < end:
            step = min(step, end - address)
            if self._call("mlock", address, step):
                self._pieces.append((address, step))
                address += step
            elif step > mmap.PAGESIZE:
                step = _whole_pages(step // 2)
            else:
                return False
        return True

    def _call(self, name: str, address: int, size: int) -> bool:
        """True when libc did it. errno is ours to read and left clear, so no error sticks."""
        function = getattr(self._libc, name, None)  # absent outside POSIX
        if function is None:
            return False
        done = function(ctypes.c_void_p(address), ctypes.c_size_t(size)) == 0
        ctypes.set_errno(0)
        return bool(done)


def _pieces(address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size_bytes, _PIECE_BYTES):
        yield address + start, _whole_pages(min(_PIECE_BYTES, size_bytes - start))


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
