"""The journal: every input and answer of an offloader, and its replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from specter_sim.offload.offloader import Offloader


class Entry(NamedTuple):
    """One call: its name, its arguments, and what was answered."""

    call: str
    args: tuple[object, ...]
    answer: object


@dataclass
class Journal:
    """Entries in the order they happened."""

    entries: list[Entry] = field(default_factory=list)

    def record(self, call: str, args: tuple[object, ...], answer: object) -> None:
        """Append one entry."""
        self.entries.append(Entry(call, args, answer))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)


class Divergence(NamedTuple):
    """Where a replay first answered differently."""

    place: int
    entry: Entry
    answer: object


def replay(journal: Journal, offloader: Offloader) -> Divergence | None:
    """Feed a journal's inputs to a fresh offloader, with no device at all.

    Returns the first entry whose answer differs, None when the two agree to the end. A policy
    that reads a clock, or anything else that is not an input, is caught here.
    """
    for place, entry in enumerate(journal):
        answer = getattr(offloader, entry.call)(*entry.args)
        if answer != entry.answer:
            return Divergence(place, entry, answer)
    return None
