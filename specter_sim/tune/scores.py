"""What every choice comes to on the tuning half: simulated once, kept on disk, never twice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol

from specter_sim.config import RunConfig
from specter_sim.engine.run import simulate_compiled, why_not
from specter_sim.results import Result
from specter_sim.setup import resolve
from specter_sim.sim import simulate
from specter_sim.tune.choice import Choice, with_part
from specter_sim.tune.space import TUNING, Space

# Enough that the threads stay busy between two batches, few enough that Ctrl-C is heard soon.
_BATCH_PER_WORKER = 32

Progress = Callable[[int, int], None]


class Objective(StrEnum):
    """What is minimised."""

    TPOT = "tpot"
    P99 = "p99"

    @property
    def metric(self) -> str:
        """The field of a result."""
        return "tpot_s" if self is Objective.TPOT else "tpot_p99_s"

    def of(self, result: Result) -> float:
        """The number to minimise, in seconds."""
        return float(getattr(result, self.metric))


class Keeper(Protocol):
    """Where scores outlive the process: a record for a key, appended once."""

    def result(self, key: str) -> dict[str, Any] | None:
        """The record of a key, if it has one."""

    def append(self, record: dict[str, Any]) -> None:
        """Keep a record."""


@dataclass(frozen=True, slots=True)
class Score:
    """Both objectives of a choice, in seconds; equal scores are the same schedule."""

    tpot_s: float
    tpot_p99_s: float


def measure(config: RunConfig) -> Result:
    """Simulate a configuration, on the compiled engine where it can. Raises SpecterError."""
    setup = resolve(config)
    return simulate(setup) if why_not(setup) else simulate_compiled(setup)


class Scores:
    """The scores of the choices of a space on its tuning half.

    ``identity`` names everything that a score depends on beside the choice: a kept score of
    another identity is not used.
    """

    def __init__(self, space: Space, objective: Objective, keeper: Keeper, identity: str) -> None:
        self.space, self.objective = space, objective
        self.reused = 0
        self.identity = identity
        self._keeper = keeper
        self._known: dict[Choice, Score] = {}

    def __len__(self) -> int:
        return len(self._known)

    def value(self, choice: Choice) -> float:
        """The objective of a choice, in seconds."""
        return self._value_of(self.of(choice))

    def known(self, choice: Choice) -> Score | None:
        """The score of a choice, if it has one already."""
        return self._known.get(choice)

    def of(self, choice: Choice) -> Score:
        """The score of a choice."""
        self.add([choice])
        return self._known[choice]

    def ranked(self) -> list[Choice]:
        """Every scored choice, the best first; of equals, the simplest."""
        order = self.space.order
        return sorted(self._known, key=lambda c: (self._value_of(self._known[c]), order(c)))

    def distinct(self, count: int) -> list[Choice]:
        """The best choices, one of each kind of schedule: equal scores are told once."""
        found: dict[Score, Choice] = {}
        for choice in self.ranked():
            found.setdefault(self._known[choice], choice)
            if len(found) == count:
                break
        return list(found.values())

    def equals(self, choice: Choice) -> int:
        """How many other choices make the same schedule."""
        return sum(score == self._known[choice] for score in self._known.values()) - 1

    def add(
        self,
        choices: Iterable[Choice],
        workers: int = 1,
        progress: Progress = lambda done, total: None,
        total: int = 0,
    ) -> None:
        """Score what has no score yet. One thread keeps; ``workers`` threads simulate."""
        missing = self._missing(choices)
        if workers == 1:
            for choice in missing:
                self.keep(choice, self.simulated(choice))
                progress(len(self._known), total)
            return
        with ThreadPoolExecutor(workers) as pool:
            for batch in _batches(missing, _BATCH_PER_WORKER * workers):
                for choice, score in zip(batch, pool.map(self.simulated, batch), strict=True):
                    self.keep(choice, score)
                progress(len(self._known), total)

    def simulated(self, choice: Choice) -> Score:
        """The score by simulation; never one that is kept. Safe on any thread."""
        result = measure(with_part(self.space.config(choice), TUNING))
        return Score(result.tpot_s, result.tpot_p99_s)

    def _missing(self, choices: Iterable[Choice]) -> Iterator[Choice]:
        for choice in choices:
            if choice in self._known:
                continue
            record = self._keeper.result(self._key(choice))
            if record is None:
                yield choice
                continue
            kept = record["result"]
            self._known[choice] = Score(float(kept["tpot_s"]), float(kept["tpot_p99_s"]))
            self.reused += 1

    def keep(self, choice: Choice, score: Score) -> float:
        """Keep a score, in memory and on disk, and return its objective. Not for two threads."""
        if choice in self._known:
            return self.value(choice)
        self._known[choice] = score
        seconds = {"tpot_s": score.tpot_s, "tpot_p99_s": score.tpot_p99_s}
        self._keeper.append({"key": self._key(choice), "result": seconds})
        return self._value_of(score)

    def _key(self, choice: Choice) -> str:
        return f"{self.identity} {choice.key}"

    def _value_of(self, score: Score) -> float:
        value = float(getattr(score, self.objective.metric))
        return value if math.isfinite(value) else math.inf


def _batches(choices: Iterator[Choice], size: int) -> Iterator[Sequence[Choice]]:
    while batch := list(islice(choices, size)):
        yield batch
