"""Eviction rules: which resident expert gives up its slot.

Each rule is a key over the flat state; among the experts that may go, the one with the
smallest key goes, and of equals the least recently used. A rule never changes the state.
"""

from __future__ import annotations

from specter_sim.policies.state import (
    DECAY,
    LAYER,
    PREFETCH,
    RESIDENT,
    SEED,
    TICK,
    WINDOW,
    State,
    VictimKey,
    group_of,
    power,
    scramble,
)

_FAR = float(1 << 50)


def lru(s: State, index: int) -> float:
    """Least recently used."""
    return float(s.last_access[index])


def fifo(s: State, index: int) -> float:
    """First loaded, first evicted."""
    return float(s.loaded[index])


def lfu(s: State, index: int) -> float:
    """Least frequently used; every window ages all uses by the decay."""
    return s.uses[index] * power(s.knobs[DECAY], s.counters[WINDOW] - s.last_window[index])


def random(s: State, index: int) -> float:
    """Any, by a seeded hash of the moment and the expert."""
    return float(scramble(int(s.knobs[SEED]), s.counters[TICK], index))


def least_stale(s: State, index: int) -> float:
    """Least-Stale (SpecMD, arXiv 2602.03921) as we read it: the longest unused pass goes first.

    Staleness counts forward passes since the last use, and a layer that this pass has not
    reached yet is not blamed for it. Equals leave in the order they came.
    """
    reached = index // s.experts <= s.counters[LAYER]
    passes = s.counters[WINDOW] - s.last_window[index] - (0 if reached else 1)
    return s.loaded[index] - passes * _FAR / (1 << 20)


def hot_lru(s: State, index: int) -> float:
    """A static hot set stays; the rest is least recently used."""
    return s.last_access[index] + s.hot[index] * _FAR


def predicted_next_use(s: State, index: int) -> float:
    """Experts that the draft announced for a layer still to come stay; the rest by decayed uses.

    What the draft routed to will be demanded in this window, so its next use is nearest. It takes
    one pool for all layers to matter: within a layer whose turn it is nothing is still to come.
    """
    ahead = index // s.experts > s.counters[LAYER]
    return lfu(s, index) + (_FAR * s.predicted[index] if ahead else 0.0)


def belady(s: State, index: int) -> float:
    """Belady's MIN: the farthest next use goes. Needs the future."""
    return -(s.next_use[index] * float(s.layers) + index // s.experts)


def find_slot(s: State, index: int, kind: int, key: VictimKey) -> int:
    """The slot that a load of ``index`` may take: a free one, else the victim's; -1 if none.

    A prefetch spares what the plan needs in a layer still to come, and the hot set; a demand takes
    such an expert only when there is no other, the planned one first. Nothing takes a slot that is
    held or still being filled.
    """
    group = group_of(s, index)
    if s.free[group] > 0:
        return free_slot(s, group)
    best, best_key, best_access, best_needed = -1, 0.0, 0, 0
    reached = (s.counters[LAYER] + 1) * s.experts
    for slot in range(s.slot_begin[group], s.slot_begin[group + 1]):
        resident = s.occupant[slot]
        if s.residency[resident] != RESIDENT or s.holds[resident] > 0:
            continue
        needed = 2 * s.hot[resident] + (s.planned[resident] if resident >= reached else 0)
        if kind == PREFETCH and needed > 0:
            continue
        if best >= 0 and needed > best_needed:
            continue
        value, access = key(s, resident), s.last_access[resident]
        if (
            best < 0
            or needed < best_needed
            or value < best_key
            or (value == best_key and access < best_access)
        ):
            best, best_key, best_access, best_needed = slot, value, access, needed
    return best


def free_slot(s: State, group: int) -> int:
    """The first free slot of a group, -1 if there is none."""
    for slot in range(s.slot_begin[group], s.slot_begin[group + 1]):
        if s.occupant[slot] < 0:
            return slot
    return -1
