"""The GPU stream on the virtual clock: one operation at a time, the host waiting for it."""

from __future__ import annotations

import simpy

from specter_sim.results import Span


class Gpu:
    """Runs operations back to back and counts what it was busy with."""

    def __init__(self, env: simpy.Environment, timeline: list[Span] | None) -> None:
        self.draft_s = 0.0
        self.compute_s = 0.0
        self._env = env
        self._timeline = timeline

    def draft(self, seconds: float, name: str) -> None:
        """One draft forward."""
        self.draft_s += seconds
        self._run(seconds, "draft", name)

    def compute(self, seconds: float, name: str) -> None:
        """A part of a target forward."""
        self.compute_s += seconds
        self._run(seconds, "compute", name)

    def _run(self, seconds: float, kind: str, name: str) -> None:
        began_s = self._env.now
        if seconds > 0:
            self._env.run(until=self._env.timeout(seconds))
        if self._timeline is not None:
            self._timeline.append(Span("gpu", name, began_s, self._env.now, {"kind": kind}))
