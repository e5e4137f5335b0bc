"""The compiled engine's journal in the words of the other worlds'."""

from __future__ import annotations

from collections.abc import Iterator

from specter_sim.engine import kernel
from specter_sim.engine.block import Block
from specter_sim.offload.journal import Entry
from specter_sim.types import Copied, DraftStep, Load, LoadKind, WindowOutcome

Flat = tuple[object, ...]


def entries_of(block: Block) -> Iterator[Flat]:
    """What a compiled run noted, as plain tuples (see ``flat_entry``)."""
    count = int(block.arrays["note_count"][0])
    rows = block.arrays["note_ints"].reshape(-1, kernel.NOTE_INTS)[:count].tolist()
    seconds = block.arrays["note_seconds"][:count].tolist()
    place = 0
    while place < count:
        call, a, b, c, d = rows[place]
        if call == kernel.DEMAND_CALL:
            experts = tuple(row[1] for row in rows[place + 1 : place + 1 + b])
            hints = tuple(row[1] for row in rows[place + 1 + b : place + 1 + b + c])
            yield ("demand", a, experts, hints)
            place += b + c
        else:
            yield _plain(call, (a, b, c, d), seconds[place])
        place += 1


def _plain(call: int, args: tuple[int, ...], seconds: float) -> Flat:
    a, b, c, d = args
    if call == kernel.BEGIN_WINDOW:
        return ("begin_window", a, b, c)
    if call == kernel.BEGIN_PASS:
        return ("begin_pass", a, b)
    if call == kernel.DRAFTED:
        return ("drafted", a, seconds)
    if call == kernel.RELEASE:
        return ("release", a)
    if call == kernel.NEXT_LOAD:
        return ("next_load", a, b, c, d) if a >= 0 else ("next_load",)
    if call == kernel.COPIED:
        return ("copied", a, b, c, d, seconds)
    if call == kernel.MUST_JOIN:
        return ("must_join", bool(a))
    if call == kernel.END_WINDOW:
        return ("end_window", a, b, c, d, seconds)
    return ("begin_request",) if call == kernel.BEGIN_REQUEST else ("end_pass",)


def flat_entry(entry: Entry) -> Flat:
    """An entry of an offloader's journal as the same plain tuple."""
    first = entry.args[0] if entry.args else None
    if isinstance(first, WindowOutcome):
        return (
            "end_window",
            first.depth,
            first.accepted,
            first.demands,
            first.loads,
            first.verify_s,
        )
    if isinstance(first, Copied):
        return ("copied", *_load(first.load), first.seconds)
    if entry.call == "drafted":
        assert isinstance(first, DraftStep)
        return ("drafted", first.step, first.seconds)
    if entry.call == "next_load":
        return ("next_load", *_load(entry.answer)) if entry.answer else ("next_load",)
    answer = () if entry.answer is None else (entry.answer,)
    return (entry.call, *entry.args, *answer)


def _load(load: object) -> Flat:
    assert isinstance(load, Load)
    kind = LoadKind(load.kind)
    return (load.expert, load.slot, int(kind), load.victim)
