"""What a report is made from: a sweep's rows, its question, and points that were measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from specter_sim.report.rows import Row, best_by, fits, panels, reads_future
from specter_sim.report.validation import ValidatedPoint

MOST_PLACES = 4


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
        """The rows with a TPOT that fit on the device, the fastest first; all when none fits."""
        known = [row for row in self.rows if row.get("tpot_s")]
        fitting = [row for row in known if fits(row)] or known
        return sorted(fitting, key=lambda row: float(row["tpot_s"]))

    @cached_property
    def real(self) -> list[Row]:
        """The shown rows that a system could have: no bounds, nothing larger than the device."""
        return [row for row in self.shown if fits(row) and not reads_future(row)]

    @cached_property
    def best(self) -> Row | None:
        """The row the answer is about."""
        return best_by(self.real)

    @cached_property
    def places(self) -> list[tuple[str, list[Row]]]:
        """The shown rows by where they run: at most `MOST_PLACES`, evenly chosen."""
        return panels(self.shown, MOST_PLACES)
