"""What a report is made from: a sweep's rows, its question, and points that were measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from specter_sim.report.rows import Row, best_by, fits, panel_keys, panels, reads_future, varying
from specter_sim.report.validation import ValidatedPoint

Place = tuple[str, list[Row]]
T = TypeVar("T")


@dataclass(frozen=True)
class Speculation:
    """The verdict for the best configuration: None when there is none."""

    pays: bool | None
    speedup: float | None
    text: str


@dataclass(frozen=True)
class Study:
    """A sweep that has been computed.

    `rows` are flat rows, one a configuration with a result; `failures` the one-line reasons of
    those without; `remarks` what the reader must know about how the rows were read.
    """

    rows: Sequence[Row]
    date: str
    version: str
    speculation: Speculation
    question: str | None = None
    failures: Sequence[str] = ()
    points: Sequence[ValidatedPoint] = ()
    remarks: Sequence[str] = ()

    @cached_property
    def shown(self) -> list[Row]:
        """The rows with a TPOT that fit on the device, in the sweep's order; all if none fits."""
        known = [row for row in self.rows if row.get("tpot_s")]
        return [row for row in known if fits(row)] or known

    @cached_property
    def real(self) -> list[Row]:
        """The shown rows that a system could have: no bounds, nothing larger than the device."""
        return [row for row in self.shown if fits(row) and not reads_future(row)]

    @cached_property
    def best(self) -> Row | None:
        """The row the answer is about."""
        return best_by(self.real)

    @cached_property
    def keys(self) -> list[str]:
        """The keys that vary among the shown rows."""
        return varying(self.shown)

    @cached_property
    def place_keys(self) -> list[str]:
        """Those of the keys that say where a run takes place."""
        return panel_keys(self.shown)

    @cached_property
    def places(self) -> list[Place]:
        """The shown rows by where they run."""
        return panels(self.shown, len(self.shown))


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly chosen, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[index * (len(items) - 1) // (most - 1)] for index in range(most)]
