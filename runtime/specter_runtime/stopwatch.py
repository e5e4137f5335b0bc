"""Where a live run's seconds go: drafting, computing the target, and everything in between.

A target pass computes except while one of its layers is visited; during a visit it computes only
in the stretches marked as such. What is left of a visit, waits taken off, is scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specter_sim.results import Span


@dataclass
class Samples:
    """Single timings, for a cost model to be fitted to.

    Attributes:
        drafts: seconds of draft forwards.
        passes: (tokens, seconds without experts, seconds of scheduling) of target forwards.
        runs: (experts, routes, seconds) of calls that applied experts.
    """

    drafts: list[float] = field(default_factory=list)
    passes: list[tuple[int, float, float]] = field(default_factory=list)
    runs: list[tuple[int, int, float]] = field(default_factory=list)


class Stopwatch:
    """Seconds by purpose since it was made, and spans of a timeline when one is given."""

    def __init__(
        self,
        now: Callable[[], float],
        waited: Callable[[], float],
        timeline: list[Span] | None = None,
    ) -> None:
        """`now`: seconds of the run's clock; `waited`: seconds spent waiting for loads so far."""
        self.draft_s = 0.0
        self.compute_s = 0.0
        self.scheduling_s = 0.0
        self.samples: Samples | None = None
        self._now, self._waited, self._timeline = now, waited, timeline

    @contextmanager
    def drafting(self, step: int) -> Iterator[Timed]:
        """One draft forward."""
        timed, began_s = Timed(self._now), self._now()
        try:
            yield timed
        finally:
            timed.seconds = self._now() - began_s
            self.draft_s += timed.seconds
        if self.samples is not None:
            self.samples.drafts.append(timed.seconds)
        self._mark("draft", f"draft {step}", began_s)

    @contextmanager
    def verifying(self, tokens: int) -> Iterator[Timed]:
        """One target forward over `tokens` tokens."""
        timed, began_s, waited_s = Timed(self._now), self._now(), self._waited()
        scheduled_s = self.scheduling_s
        try:
            yield timed
        finally:
            compute_s = self._now() - began_s - timed.visits_s
            self.compute_s += compute_s
            self.scheduling_s += timed.visits_s - (self._waited() - waited_s)
        if self.samples is not None:
            self.samples.passes.append((tokens, compute_s, self.scheduling_s - scheduled_s))
        self._mark("verify", "target pass", began_s)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A part of a visit that computes hints."""
        began_s = self._now()
        try:
            yield
        finally:
            self._computed(self._now() - began_s)

    @contextmanager
    def applying(self, layer: int, experts: int, routes: int) -> Iterator[None]:
        """A part of a visit that applies experts to so many token-expert pairs."""
        began_s = self._now()
        try:
            yield
        finally:
            seconds = self._now() - began_s
            self._computed(seconds)
        if self.samples is not None:
            self.samples.runs.append((experts, routes, seconds))
        if self._timeline is not None:
            self._mark("compute", f"{experts} experts of layer {layer}", began_s)

    def _computed(self, seconds: float) -> None:
        self.compute_s += seconds
        self.scheduling_s -= seconds

    def _mark(self, kind: str, name: str, began_s: float) -> None:
        if self._timeline is not None:
            self._timeline.append(Span("gpu", name, began_s, self._now(), {"kind": kind}))


class Timed:
    """One stretch: its seconds once it is over, and those spent in visits."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.seconds = 0.0
        self.visits_s = 0.0
        self._now = now

    def around(self, visit: Callable[[int], object]) -> Callable[[int], None]:
        """The same visit, timed."""

        def timed(layer: int) -> None:
            began_s = self._now()
            try:
                visit(layer)
            finally:
                self.visits_s += self._now() - began_s

        return timed
