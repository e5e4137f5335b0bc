"""The device port on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import simpy

from specter_sim.sim.link import LinkProcess
from specter_sim.types import Copied, Load


class SimDevice:
    """One simulated link; every finished copy feeds it again, whatever the GPU is doing."""

    def __init__(self, env: simpy.Environment, link: LinkProcess) -> None:
        self.on_completion: Callable[[], object] = lambda: None
        self._env, self._link = env, link
        self._arrived: list[Copied] = []
        self._waiting: simpy.Event | None = None
        self._in_flight = 0
        link.on_arrival = self._arrive

    def now(self) -> float:
        """Virtual seconds since the run began."""
        return float(self._env.now)

    def can_start(self) -> bool:
        """Whether the link takes another load now."""
        return self._link.can_start()

    def start(self, load: Load) -> None:
        """Submit a load to the link."""
        self._in_flight += 1
        self._link.start(load)

    def poll(self) -> Sequence[Copied]:
        """Loads that arrived since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def wait(self) -> Sequence[Copied]:
        """Let time pass until a load arrives."""
        assert self._in_flight > 0, "waiting with nothing under way: the schedule would hang"
        self._waiting = self._env.event()
        self._env.run(until=self._waiting)
        return self.poll()

    def _arrive(self, copied: Copied) -> None:
        self._in_flight -= 1
        self._arrived.append(copied)
        self.on_completion()
        if self._waiting is not None:
            self._waiting.succeed()
            self._waiting = None
