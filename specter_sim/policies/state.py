"""The flat state that every scheduling rule reads and writes.

One NamedTuple of flat sequences, indexed by ``layer * num_experts + expert`` unless said
otherwise. Under the SimPy world and the runtime the sequences are lists, the fastest thing to
index from plain Python; a compiler can be given arrays instead, because rules use nothing but
indexing and arithmetic: no length, no slice, no iteration. Scalars that change live in
``counters``.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, NamedTuple

Numbers = Any  # a sequence of numbers: a list, a tuple or a numpy array
Ints = MutableSequence[int]
Floats = MutableSequence[float]

# Residency, and the values of ``types.LoadKind``: plain ints, compared millions of times.
ABSENT, LOADING, RESIDENT = 0, 1, 2
DEMAND, PREFETCH = 0, 1

(
    TICK,  # accesses so far; every access has its own
    WINDOW,  # windows begun
    POSITION,  # position of the window's first input in the text
    NEXT_START,  # where the next window will begin, for rules that know the future
    DEPTH,  # tokens drafted in this window
    LAYER,  # MoE layer under verification; -1 while drafting
    DEMAND_HEAD,
    DEMAND_TAIL,
    PLAN_HEAD,
    PLAN_TAIL,
    MEMBERS,  # entries of ``members``
    HINTED,  # entries of ``hints``
    TOUCHED,  # entries of ``touched``
    PREFETCHING,  # prefetches on the link
    HITS,
    PENDING,
    MISSES,
    DEMAND_LOADS,
    PREFETCH_LOADS,
    EVICTIONS,
    USEFUL,
    LATE,
    WASTED,
    NUM_COUNTERS,
) = range(24)

# Fixed parameters of the rules, in ``knobs``.
DECAY, FORGET, SEED, NUM_KNOBS = range(4)

NEVER = 1 << 40  # a position no text reaches


class State(NamedTuple):
    """Everything a rule may look at. ``E`` experts in each of ``L`` layers, ``S`` slots."""

    layers: int
    experts: int
    groups: int  # eviction groups: L, or 1 for a global budget; staging not counted
    top_k: int
    known: int  # entries of ``accepted_run``
    ahead: int  # entries of ``routes_ahead``
    counters: Ints  # [NUM_COUNTERS]
    knobs: Floats  # [NUM_KNOBS]
    residency: Ints  # [L*E]
    slot_of: Ints  # [L*E], -1 when absent
    holds: Ints  # [L*E] how often the expert is held
    last_access: Ints  # [L*E] tick
    last_window: Ints  # [L*E] window of the last access
    loaded: Ints  # [L*E] tick of the last load
    uses: Floats  # [L*E] uses, decayed up to ``last_window``
    fresh: Ints  # [L*E] 1: prefetched and not used since
    hot: Ints  # [L*E] 1: belongs to a static hot set
    predicted: Ints  # [L*E] draft tokens of this window routed here
    planned: Ints  # [L*E] 1: in the current plan, resident or not
    next_use: Ints  # [L*E] position of the next use, for rules that know the future
    future_begin: Ints  # [L*E+1] slices of ``future``
    future: Ints  # positions of use, ascending, expert by expert
    routes_ahead: Ints  # [positions*L*K] flat indices, for an oracle prefetch
    accepted_run: Ints  # [positions] proposals accepted from here on, for rules that know it
    occupant: Ints  # [S] flat index of the expert in a slot, -1 when free
    free: Ints  # [groups+1] free slots per group; the last is the staging pool
    slot_begin: Ints  # [groups+2] slots of a group are slot_begin[g] .. slot_begin[g+1]
    demand_queue: Ints  # [L*E]
    plan_queue: Ints  # [L*E]
    members: Ints  # [L*E] experts in the plan, resident or not
    hints: Ints  # [E] experts a gate expects in the next layer
    touched: Ints  # [L*E] experts with predicted > 0


VictimKey = Callable[[State, int], float]
"""An eviction rule: the expert with the smallest key is evicted; ties go to the least recent."""


def new_state(
    layers: int,
    experts: int,
    top_k: int,
    slots: Sequence[int],
    *,
    staging_slots: int = 0,
    decay: float = 1.0,
    forget: bool = False,
    seed: int = 0,
    hot: Numbers | None = None,
    future: tuple[Numbers, Numbers] | None = None,
    routes_ahead: Numbers = (),
    accepted_run: Numbers = (),
    position: int = 0,
    array: Callable[[int, float], Any] | None = None,
) -> State:
    """An empty device: nothing resident, nothing planned.

    Args:
        slots: slots of each eviction group, one number a layer, or a single number for a
            budget shared by all layers.
        staging_slots: transient slots for demand loads that leave residents alone.
        decay: what a use is worth one window later (1 forgets nothing).
        forget: whether an evicted expert loses its uses.
        hot: flags [L*E] of a static hot set.
        future: (begin [L*E+1], positions): when each expert is used.
        routes_ahead: [positions*L*K] flat indices of the target's routes.
        accepted_run: [positions] how many proposals in a row are accepted from there.
        position: where the text to be decoded begins; earlier uses are past.
        array: makes a sequence of ``count`` equal numbers; lists unless given.
    """
    array = list_of if array is None else array
    total, groups = layers * experts, len(slots)
    begin = [0]
    for count in (*slots, staging_slots):
        begin.append(begin[-1] + count)
    counters = [0] * NUM_COUNTERS
    counters[LAYER] = -1
    future_begin, positions = ((), ()) if future is None else future
    state = State(
        layers=layers,
        experts=experts,
        groups=groups,
        top_k=top_k,
        known=len(accepted_run),
        ahead=len(routes_ahead),
        counters=copy_of(counters, array),
        knobs=copy_of([decay, float(forget), float(seed)], array, 0.0),
        residency=array(total, ABSENT),
        slot_of=array(total, -1),
        holds=array(total, 0),
        last_access=array(total, 0),
        last_window=array(total, 0),
        loaded=array(total, 0),
        uses=array(total, 0.0),
        fresh=array(total, 0),
        hot=array(total, 0) if hot is None else copy_of(hot, array),
        predicted=array(total, 0),
        planned=array(total, 0),
        next_use=array(total, NEVER),
        future_begin=copy_of(future_begin, array),
        future=copy_of(positions, array),
        routes_ahead=copy_of(routes_ahead, array),
        accepted_run=copy_of(accepted_run, array),
        occupant=array(begin[-1], -1),
        free=copy_of([*slots, staging_slots], array),
        slot_begin=copy_of(begin, array),
        demand_queue=array(total, 0),
        plan_queue=array(total, 0),
        members=array(total, 0),
        hints=array(experts, 0),
        touched=array(total, 0),
    )
    if future is not None:
        for index in range(total):
            seek_future(state, index, position)
    return state


def list_of(count: int, value: float) -> Any:
    """A list of ``count`` equal numbers: how the interpreted worlds keep a state."""
    return [value] * count


def copy_of(values: Any, array: Callable[[int, float], Any], zero: float = 0) -> Any:
    """The numbers of ``values`` in a sequence of the kind ``array`` makes."""
    made = array(len(values), zero)
    made[:] = values.tolist() if isinstance(made, list) and hasattr(values, "tolist") else values
    return made


def group_of(s: State, index: int) -> int:
    """The eviction group of an expert: its layer, or 0 under a global budget."""
    return index // s.experts if s.groups > 1 or s.layers == 1 else 0


def seek_future(s: State, index: int, position: int) -> None:
    """Set ``next_use`` to the first use at or after ``position`` (binary search)."""
    low, high = s.future_begin[index], s.future_begin[index + 1]
    end = high
    while low < high:
        middle = (low + high) // 2
        if s.future[middle] < position:
            low = middle + 1
        else:
            high = middle
    s.next_use[index] = s.future[low] if low < end else NEVER


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: only products, so every world rounds alike."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def scramble(seed: int, a: int, b: int) -> int:
    """A number in [0, 2**31) that depends on all three, equal on every platform."""
    x = (seed * 0x9E3779B1 + a * 0x85EBCA6B + b * 0xC2B2AE35) & 0x7FFFFFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
    x = ((x ^ (x >> 15)) * 0x45D9F3B) & 0x7FFFFFFF
    return x ^ (x >> 16)
