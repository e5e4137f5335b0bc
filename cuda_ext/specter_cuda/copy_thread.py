"""A native thread that copies memory at the pace of a link, without the GIL.

It stands in for a GPU's copy engine: copies run in submission order, each one a real memcpy, and a
copy is reported once the link would have delivered its last byte.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
import weakref
from types import TracebackType
from typing import NamedTuple

from specter_cuda.library import LIBRARY

_SLICE_S = 0.1
"""Longest uninterrupted wait: Python sees Ctrl-C between two of them."""


class Completion(NamedTuple):
    """A finished copy. Times are seconds of CLOCK_MONOTONIC, the clock of `time.monotonic()`.

    It began when the copy before it had ended, or when it was submitted if that was later.
    """

    tag: int
    copied_bytes: int
    began_s: float
    ended_s: float


class _Record(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_int64),
        ("copied_bytes", ctypes.c_uint64),
        ("began_s", ctypes.c_double),
        ("ended_s", ctypes.c_double),
    )


_ROOM = 64
_Records = _Record * _ROOM

_new = LIBRARY.specter_copy_thread_new
_new.restype = ctypes.c_void_p
_new.argtypes = (ctypes.c_double, ctypes.c_double, ctypes.c_uint64, ctypes.c_int)
_submit = LIBRARY.specter_copy_thread_submit
_submit.restype = ctypes.c_int
_submit.argtypes = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint64,
)
_take = LIBRARY.specter_copy_thread_take
_take.restype = ctypes.c_uint64
_take.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_double)
_outstanding = LIBRARY.specter_copy_thread_outstanding
_outstanding.restype = ctypes.c_uint64
_outstanding.argtypes = (ctypes.c_void_p,)
_close = LIBRARY.specter_copy_thread_close
_close.restype = None
_close.argtypes = (ctypes.c_void_p,)
_free = LIBRARY.specter_copy_thread_free
_free.restype = None
_free.argtypes = (ctypes.c_void_p,)


class CopyThread:
    """One native thread that copies memory in submission order and paces itself like a link.

    Data of a copy starts when the copy before it has ended, and `latency_s` after its submission at
    the earliest, so a queue hides latency; it ends `size / bytes_per_s` later. A copy longer than
    `granularity_bytes` is cut: every further piece costs the latency again, as far as
    `queue_depth` pieces in flight do not hide it. `bytes_per_s` None copies as fast as memory does.

    Memory must stay valid until its copy is reported or the thread is closed. After a fork the
    child's object is closed: the thread stays with the parent. Raises ValueError for a pace that
    makes no sense, OSError when the system gives no thread.
    """

    def __init__(
        self,
        bytes_per_s: float | None,
        latency_s: float = 0.0,
        granularity_bytes: int | None = None,
        queue_depth: int = 1,
    ) -> None:
        _check_pace(bytes_per_s, latency_s, granularity_bytes, queue_depth)
        handle = _new(bytes_per_s or 0.0, latency_s, granularity_bytes or 0, queue_depth)
        if not handle:
            raise OSError("the system gives no further thread: close other copy threads first")
        self._handle, self._process, self._closed = handle, os.getpid(), False
        weakref.finalize(self, _release, handle, self._process).atexit = False
        _open_threads.add(self)

    def submit(self, tag: int, destination: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses; never blocks.

        `tag` (64 bits, signed) comes back in the Completion. Raises ValueError once closed, or for
        a null address or a negative size.
        """
        if size < 0 or (size > 0 and not (destination > 0 and source > 0)):
            raise ValueError(f"cannot copy {size} bytes from {source:#x} to {destination:#x}")
        submitted = self._usable and _submit(self._handle, tag, destination, source, size)
        if submitted < 0:
            raise MemoryError("no memory left to queue a copy")
        if not submitted:
            raise ValueError("the copy thread is closed: open a new one to copy more")

    def poll(self) -> list[Completion]:
        """The copies finished since the last call, in order; never blocks."""
        return self._taken(0.0)

    def wait(self, timeout_s: float) -> list[Completion]:
        """Like `poll`, but waits up to `timeout_s` for the first copy to finish.

        Returns at once when nothing is outstanding.
        """
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            taken = self._taken(max(min(left_s, _SLICE_S), 0.0))
            if taken or left_s <= _SLICE_S or not self.outstanding:
                return taken

    @property
    def outstanding(self) -> int:
        """Number of copies submitted and not yet finished."""
        return int(_outstanding(self._handle)) if os.getpid() == self._process else 0

    def close(self) -> None:
        """Drop what has not finished and end the thread; memory is left alone afterwards.

        Waits for a few MiB being copied at most. What finished before can still be polled.
        """
        if self._usable:
            self._closed = True
            _close(self._handle)

    def __enter__(self) -> CopyThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _usable(self) -> bool:
        return not self._closed and os.getpid() == self._process

    def _taken(self, timeout_s: float) -> list[Completion]:
        if os.getpid() != self._process:
            return []
        taken: list[Completion] = []
        records = _Records()
        while True:
            number = _take(self._handle, ctypes.addressof(records), _ROOM, timeout_s)
            taken += [
                Completion(record.tag, record.copied_bytes, record.began_s, record.ended_s)
                for record in records[:number]
            ]
            if number < _ROOM:
                return taken
            timeout_s = 0.0


_open_threads: weakref.WeakSet[CopyThread] = weakref.WeakSet()


def _close_all() -> None:
    """Threads stop before the interpreter frees the memory they copy."""
    for thread in list(_open_threads):
        thread.close()


atexit.register(_close_all)


def _release(handle: int, process: int) -> None:
    if os.getpid() == process:
        _free(handle)


def _check_pace(
    bytes_per_s: float | None, latency_s: float, granularity_bytes: int | None, queue_depth: int
) -> None:
    if bytes_per_s is not None and not bytes_per_s > 0:
        raise ValueError(f"bytes_per_s must be positive, or None for no pace, got {bytes_per_s}")
    if not latency_s >= 0:
        raise ValueError(f"latency_s must not be negative, got {latency_s}")
    if granularity_bytes is not None and granularity_bytes < 1:
        raise ValueError(f"granularity_bytes must be at least 1, got {granularity_bytes}")
    if queue_depth < 1:
        raise ValueError(f"queue_depth must be at least 1, got {queue_depth}")
