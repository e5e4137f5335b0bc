"""The device port on the wall clock: one link into slots, over any copier.

A copy that did not arrive whole is made again; after some tries the request ends with an error.
Nothing that arrived in part is ever used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specter_runtime.devices.copier import Completion, Copier
from specter_runtime.slots import Slots
from specter_sim.results import Span
from specter_sim.types import Copied, Load
from specter_traces.errors import SpecterError

MOST_TRIES = 8
PATIENCE_S = 60.0
"""How long a wait may last without any copy ending before the link counts as dead."""


@dataclass(frozen=True)
class _Flight:
    """A load under way, and which try it is."""

    load: Load
    tries: int


class LiveDevice:
    """One link and one clock. `on_completion` is called where the model lets it be served."""

    def __init__(
        self,
        copier: Copier,
        slots: Slots,
        queue_depth: int,
        *,
        check: bool = False,
        timeline: list[Span] | None = None,
    ) -> None:
        """`check` compares every arrival with the host's copy, and copies damaged ones again."""
        self.on_completion: Callable[[], object] = lambda: None
        self.link_busy_s = 0.0
        self.waited_s = 0.0
        self.moved_bytes = 0
        self.failed_copies = 0
        self._copier, self._slots, self._queue_depth = copier, slots, queue_depth
        self._check, self._timeline = check, timeline
        self._flights: dict[int, _Flight] = {}
        self._next_tag = 0
        self._origin_s = time.monotonic()

    def now(self) -> float:
        """Seconds since the device was made."""
        return time.monotonic() - self._origin_s

    def can_start(self) -> bool:
        """Whether the queue of submitted copies has room."""
        return len(self._flights) < self._queue_depth

    def start(self, load: Load) -> None:
        """Submit a load. Never blocks."""
        self._submit(_Flight(load, 1))

    def poll(self) -> Sequence[Copied]:
        """Loads finished since the last call. SpecterError when one cannot be copied."""
        return self._arrived(self._copier.poll()) if self._flights else ()

    def wait(self) -> Sequence[Copied]:
        """Block until a load has finished. SpecterError when none does."""
        if not self._flights:
            raise RuntimeError("waiting with nothing under way: the schedule would hang")
        began_s = time.monotonic()
        while time.monotonic() < began_s + PATIENCE_S:
            arrived = self._arrived(self._copier.wait(PATIENCE_S))
            if arrived:
                self.waited_s += time.monotonic() - began_s
                return arrived
        raise SpecterError(
            f"no copy has finished for {PATIENCE_S:.0f} s: the link is dead; end the run"
        )

    def serve(self) -> None:
        """Keep the link fed: for a model to call between its layers."""
        if self._flights:
            self.on_completion()

    def abandon(self) -> None:
        """Forget the loads under way once their copies have ended: their slots are free again."""
        until_s = time.monotonic() + PATIENCE_S
        while self._flights and time.monotonic() < until_s:
            for completion in self._copier.wait(PATIENCE_S):
                self._flights.pop(completion.tag, None)
        self._flights.clear()

    def close(self) -> None:
        """Stop copying."""
        self._copier.close()

    def _submit(self, flight: _Flight) -> None:
        transfer = self._slots.begin_load(flight.load.slot, flight.load.expert)
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._copier.submit(tag, transfer.destination, transfer.source, transfer.size)
        self._flights[tag] = flight

    def _arrived(self, ended: Sequence[Completion]) -> list[Copied]:
        arrived = []
        # All are taken off first: an error about one must not leave another under way for ever.
        landed = [(self._flights.pop(completion.tag), completion) for completion in ended]
        for flight, completion in landed:
            self._account(flight.load, completion)
            if self._is_whole(flight.load, completion):
                self._slots.arrived(flight.load.slot, flight.load.expert)
                arrived.append(Copied(flight.load, completion.ended_s - completion.began_s))
            else:
                self._again(flight)
        return arrived

    def _is_whole(self, load: Load, completion: Completion) -> bool:
        if completion.copied_bytes != self._slots.load_bytes(load.expert):
            return False
        return not self._check or self._slots.matches(load.slot, load.expert)

    def _again(self, flight: _Flight) -> None:
        self.failed_copies += 1
        if flight.tries == MOST_TRIES:
            layer, expert = divmod(flight.load.expert, self._slots.experts)
            raise SpecterError(
                f"expert {expert} of MoE layer {layer} did not arrive in {MOST_TRIES} tries: "
                "the link cannot be trusted; the request ends here"
            )
        self._submit(_Flight(flight.load, flight.tries + 1))

    def _account(self, load: Load, completion: Completion) -> None:
        self.link_busy_s += completion.ended_s - completion.began_s
        self.moved_bytes += completion.copied_bytes
        if self._timeline is not None:
            layer, expert = divmod(load.expert, self._slots.experts)
            began_s, ended_s = completion.began_s, completion.ended_s
            args: dict[str, str | int | float] = {
                "kind": load.kind.name.lower(),
                "slot": load.slot,
                "bytes": completion.copied_bytes,
            }
            name = f"layer {layer} expert {expert}"
            origin_s = self._origin_s
            self._timeline.append(Span("link", name, began_s - origin_s, ended_s - origin_s, args))
