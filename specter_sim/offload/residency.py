"""Residency: which expert sits in which slot, and who may not leave.

Four transitions over the flat state. One slot per expert, one expert per slot; held and loading
experts are never evicted; weights never change, so eviction copies nothing back.
"""

from __future__ import annotations

from specter_sim.policies.state import (
    ABSENT,
    DECAY,
    EVICTIONS,
    FORGET,
    LOADING,
    NEXT_START,
    RESIDENT,
    TICK,
    WINDOW,
    State,
    power,
    seek_future,
)


def reserve(s: State, group: int, slot: int, index: int) -> int:
    """Give a slot to an absent expert and evict who was there; returns the victim or -1."""
    victim = s.occupant[slot]
    if victim >= 0:
        vacate(s, slot)
        s.counters[EVICTIONS] += 1
    else:
        s.free[group] -= 1
    s.occupant[slot] = index
    s.slot_of[index] = slot
    s.residency[index] = LOADING
    s.counters[TICK] += 1
    s.loaded[index] = s.counters[TICK]
    return victim


def vacate(s: State, slot: int) -> None:
    """Make the expert of a slot absent. The caller gives the slot away or counts it free."""
    index = s.occupant[slot]
    s.residency[index] = ABSENT
    s.slot_of[index] = -1
    s.occupant[slot] = -1
    s.fresh[index] = 0
    if s.knobs[FORGET]:
        s.uses[index] = 0.0


def arrived(s: State, index: int) -> None:
    """A load finished."""
    s.residency[index] = RESIDENT


def access(s: State, index: int) -> None:
    """One use of an expert: tick, decayed count, window, and where its next use is."""
    c = s.counters
    c[TICK] += 1
    s.last_access[index] = c[TICK]
    if s.knobs[DECAY] < 1.0 and s.uses[index] > 0.0 and s.last_window[index] != c[WINDOW]:
        s.uses[index] *= power(s.knobs[DECAY], c[WINDOW] - s.last_window[index])
    s.uses[index] += 1.0
    s.last_window[index] = c[WINDOW]
    if s.next_use[index] < c[NEXT_START]:
        seek_future(s, index, c[NEXT_START])
