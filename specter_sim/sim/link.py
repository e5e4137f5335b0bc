"""The link on the virtual clock: loads in submission order, latency hidden by queueing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import simpy

from specter_sim.hardware.machines import Link
from specter_sim.results import Span
from specter_sim.sim.host import HostMemory
from specter_sim.types import Copied, Load


class LinkProcess:
    """Serves loads first come, first served.

    A load's latency runs from its submission, so with a queue it hides behind the data of the
    loads before it. Loads of pageable experts pass a CPU copy into a pinned bounce buffer first;
    that copy and the link's reads share the host's memory bandwidth. Expansion of a coded expert
    follows on the device and holds nothing else up.
    """

    def __init__(
        self,
        env: simpy.Environment,
        link: Link,
        host: HostMemory,
        load_bytes: int,
        expand_s: float,
        pinned: Callable[[int], bool],
        bounce_bytes_per_s: float,
        name: Callable[[int], str],
        timeline: list[Span] | None,
    ) -> None:
        self.busy_s = 0.0
        self._env, self._link, self._host = env, link, host
        self._load_bytes, self._expand_s = load_bytes, expand_s
        self._pinned, self._bounce_bytes_per_s = pinned, bounce_bytes_per_s
        self._name, self._timeline = name, timeline
        self._queue: deque[tuple[Load, float, simpy.Event | None]] = deque()
        self._submitted = 0
        self._wake: simpy.Event | None = None
        self._expander_free_s = 0.0
        self._bouncer_free: simpy.Event | None = None
        self._pieces_s = link.copy_s(load_bytes) - link.latency_s - load_bytes / link.bytes_per_s
        self.on_arrival: Callable[[Copied], None] = lambda copied: None
        env.process(self._serve())

    def can_start(self) -> bool:
        """Whether the queue of submitted loads has room."""
        return self._submitted < self._link.queue_depth

    @property
    def idle(self) -> bool:
        """Whether nothing is submitted."""
        return self._submitted == 0

    def start(self, load: Load) -> None:
        """Submit a load."""
        self._submitted += 1
        bounced = None if self._pinned(load.expert) else self._bounce()
        self._queue.append((load, self._env.now, bounced))
        if self._wake is not None:
            self._wake.succeed()
            self._wake = None

    def _serve(self) -> Generator[simpy.Event, object, None]:
        env, latency_s = self._env, self._link.latency_s
        while True:
            if not self._queue:
                self._wake = env.event()
                yield self._wake
            load, submitted_s, bounced = self._queue[0]
            began_s = env.now
            if bounced is not None and not bounced.processed:
                yield bounced
            ready_s = submitted_s + latency_s
            if ready_s > env.now:
                yield env.timeout(ready_s - env.now)
            yield self._host.transfer(self._load_bytes, self._link.bytes_per_s)
            if self._pieces_s > 0:
                yield env.timeout(self._pieces_s)
            self._finish(load, began_s)

    def _finish(self, load: Load, began_s: float) -> None:
        now_s = self._env.now
        self._queue.popleft()
        self._submitted -= 1
        self.busy_s += now_s - began_s
        if self._timeline is not None:
            args: dict[str, str | int | float] = {"kind": load.kind.name.lower(), "slot": load.slot}
            self._timeline.append(Span("link", self._name(load.expert), began_s, now_s, args))
        copied = Copied(load, now_s - began_s)
        if self._expand_s > 0:
            self._expand(copied)
        else:
            self.on_arrival(copied)

    def _expand(self, copied: Copied) -> None:
        now_s = self._env.now
        self._expander_free_s = max(self._expander_free_s, now_s) + self._expand_s
        timeout = self._env.timeout(self._expander_free_s - now_s)
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: self.on_arrival(copied))

    def _bounce(self) -> simpy.Event:
        """The CPU copies one load into a pinned buffer, after the one before it."""
        before, done = self._bouncer_free, self._env.event()
        self._bouncer_free = done

        def work() -> Generator[simpy.Event, object, None]:
            if before is not None and not before.processed:
                yield before
            yield self._host.transfer(self._load_bytes, self._bounce_bytes_per_s, traffic=2.0)
            done.succeed()

        self._env.process(work())
        return done
