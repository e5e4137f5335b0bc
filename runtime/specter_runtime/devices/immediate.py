"""A link without limits: a copy is done when it is submitted."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from specter_runtime.devices.copier import Completion


class ImmediateCopier:
    """Copies on the caller's thread, as fast as memory allows."""

    def __init__(self) -> None:
        self._finished: list[Completion] = []

    def submit(self, tag: int, destination: int, source: int, size: int) -> None:
        """Copy now."""
        began_s = time.monotonic()
        ctypes.memmove(destination, source, size)
        self._finished.append(Completion(tag, size, began_s, time.monotonic()))

    def poll(self) -> Sequence[Completion]:
        """What was submitted since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """As `poll`: nothing is ever under way."""
        return self.poll()

    def close(self) -> None:
        """Nothing to stop."""
