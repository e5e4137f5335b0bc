"""What a device copies with: bytes from one address to another, in submission order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specter_cuda import Completion

__all__ = ["Completion", "Copier"]


class Copier(Protocol):
    """A copy engine. Times are those of `time.monotonic`."""

    def submit(self, tag: int, destination: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses. Never blocks."""

    def poll(self) -> Sequence[Completion]:
        """Copies finished since the last call. Never blocks."""

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """Block until a copy has finished, or for `timeout_s`; then as `poll`."""

    def close(self) -> None:
        """Stop; copies under way are finished first, queued ones are dropped."""
