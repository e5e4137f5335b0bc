"""Host memory on the virtual clock: a bandwidth that copies and CPU work share."""

from __future__ import annotations

from dataclasses import dataclass

import simpy


@dataclass
class Flow:
    """One stream of bytes through host memory.

    ``traffic`` is memory traffic per byte: 1 for a copy the link reads, 2 for a CPU copy.
    """

    remaining_bytes: float
    most_bytes_per_s: float
    traffic: float
    done: simpy.Event
    bytes_per_s: float = 0.0


class HostMemory:
    """Shares a bandwidth among flows, in proportion to what they ask for."""

    def __init__(self, env: simpy.Environment, bytes_per_s: float) -> None:
        self._env = env
        self._bytes_per_s = bytes_per_s
        self._flows: list[Flow] = []
        self._settled_s = 0.0
        self._version = 0

    def transfer(self, size: float, most_bytes_per_s: float, traffic: float = 1.0) -> simpy.Event:
        """Move ``size`` bytes; the event fires when they are through."""
        self._advance()
        flow = Flow(size, most_bytes_per_s, traffic, self._env.event())
        self._flows.append(flow)
        self._share()
        return flow.done

    def _advance(self) -> None:
        elapsed_s = self._env.now - self._settled_s
        for flow in self._flows:
            flow.remaining_bytes -= elapsed_s * flow.bytes_per_s
        self._settled_s = self._env.now

    def _share(self) -> None:
        """Set every rate anew and wake up when the first flow is through."""
        self._version += 1
        if not self._flows:
            return
        asked = sum(flow.most_bytes_per_s * flow.traffic for flow in self._flows)
        scale = min(1.0, self._bytes_per_s / asked)
        for flow in self._flows:
            flow.bytes_per_s = flow.most_bytes_per_s * scale
        first = min(self._flows, key=lambda f: f.remaining_bytes / f.bytes_per_s)
        wait_s = max(0.0, first.remaining_bytes / first.bytes_per_s)
        self._wake(wait_s, first, self._version)

    def _wake(self, wait_s: float, first: Flow, version: int) -> None:
        timeout = self._env.timeout(wait_s)

        def finish(_: simpy.Event) -> None:
            if version != self._version:
                return
            self._advance()
            self._flows.remove(first)
            self._share()
            first.done.succeed()

        assert timeout.callbacks is not None
        timeout.callbacks.append(finish)
