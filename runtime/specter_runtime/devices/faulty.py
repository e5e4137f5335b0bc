"""Faults on purpose: a copier that delays, reorders, drops and cuts copies, by a seed.

For tests and for trusting a runtime: whatever a link does, a request ends with the right tokens or
with a clear error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from specter_runtime.devices.copier import Completion, Copier


@dataclass(frozen=True)
class Faults:
    """How often each fault happens to a copy, as shares of one.

    Attributes:
        late: the copy is reported `late_s` after it ended.
        reordered: it is reported after copies that ended later.
        failed: nothing arrives, and the copy says so.
        partial: half of it arrives, and the copy says so.
        damaged: half of it arrives, and the copy claims all of it: only checked copies notice.
    """

    late: float = 0.0
    reordered: float = 0.0
    failed: float = 0.0
    partial: float = 0.0
    damaged: float = 0.0
    late_s: float = 2e-3
    seed: int = 0


class FaultyCopier:
    """Wraps a copier; what is not hit by a fault passes through."""

    def __init__(self, copier: Copier, faults: Faults) -> None:
        self._copier, self._faults = copier, faults
        self._random = random.Random(faults.seed)
        self._claimed: dict[int, int] = {}
        self._failed: list[Completion] = []
        self._late: list[tuple[float, Completion]] = []
        self._kept_back: set[int] = set()

    def submit(self, tag: int, destination: int, source: int, size: int) -> None:
        """Queue the copy, or what a fault makes of it."""
        faults = self._faults
        if self._hit(faults.failed):
            now_s = time.monotonic()
            self._failed.append(Completion(tag, 0, now_s, now_s))
        elif self._hit(faults.partial):
            self._copier.submit(tag, destination, source, size // 2)
        elif self._hit(faults.damaged):
            self._claimed[tag] = size
            self._copier.submit(tag, destination, source, size // 2)
        else:
            self._copier.submit(tag, destination, source, size)

    def poll(self) -> Sequence[Completion]:
        """What has ended, except what is kept back."""
        return self._passed_on(self._copier.poll())

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """Wait for the copier, or for the first copy that is kept back."""
        ready = self.poll()
        if ready:
            return ready
        until_s = time.monotonic() + timeout_s
        if self._late:
            until_s = min(until_s, *(due_s for due_s, _ in self._late))
        ended = self._copier.wait(max(0.0, until_s - time.monotonic()))
        if not ended and self._late:
            time.sleep(max(0.0, until_s - time.monotonic()))
        return self._passed_on(ended)

    def close(self) -> None:
        """Close the copier."""
        self._copier.close()

    def _passed_on(self, ended: Sequence[Completion]) -> Sequence[Completion]:
        now_s = time.monotonic()
        for completion in ended:
            claimed = self._claimed.pop(completion.tag, completion.copied_bytes)
            completion = completion._replace(copied_bytes=claimed)
            delay_s = self._faults.late_s if self._hit(self._faults.late) else 0.0
            self._late.append((now_s + delay_s, completion))
        ready = [completion for until, completion in self._late if until <= now_s]
        self._late = [(until, late) for until, late in self._late if until > now_s]
        ready += self._failed
        self._failed = []
        if len(ready) > 1 and self._hit(self._faults.reordered):
            self._random.shuffle(ready)
        elif ready and ready[-1].tag not in self._kept_back and self._hit(self._faults.reordered):
            # Alone it can only swap places with the next one, and waits for it once.
            self._kept_back.add(ready[-1].tag)
            self._late.append((now_s + self._faults.late_s / 2, ready.pop()))
        self._kept_back.difference_update(completion.tag for completion in ready)
        return ready

    def _hit(self, share: float) -> bool:
        return share > 0 and self._random.random() < share
