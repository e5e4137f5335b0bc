"""Lower bounds: the loads no schedule can avoid.

A clairvoyant cache serves the same demands in the same order. After each layer of each window it
may keep any of what it held and what it just used, so keeping the nearest next uses is optimal
(Belady's exchange argument for batches); it never loads what it does not need now.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence, Sequence
from itertools import accumulate


def least_loads(unions: Sequence[Sequence[int]], slots: int, resident: Iterable[int] = ()) -> int:
    """The fewest loads that serve a sequence of demands with one pool of slots.

    Args:
        unions: the experts of each demand, ids from 0, each once, in order.
        slots: size of the pool; a demand may be larger, its overflow is simply not kept.
        resident: what is in the pool at the start.
    """
    held = list(resident)
    ids = [expert for union in unions for expert in union]
    ends = list(accumulate(len(union) for union in unions))
    bound = max([-1, *ids, *held]) + 1
    kept = [0] * bound
    for expert in held:
        kept[expert] = 1
    work = [0] * len(ids), [0] * bound, [0] * bound
    return count_least_loads(ids, ends, len(unions), slots, bound, kept, *work)


def least_loads_of_run(
    unions: Sequence[Sequence[int]],
    slots: Sequence[int],
    layers: int,
    experts: int,
    resident: Iterable[int],
) -> int:
    """The fewest loads of a whole run.

    Args:
        unions: ids in the layer, one list per window and layer, layers innermost.
        slots: of each layer, or one pool for all.
        resident: flat indices that are on the device at the start.
    """
    resident = list(resident)
    if len(slots) == 1 and layers > 1:
        flat = [
            [place % layers * experts + expert for expert in union]
            for place, union in enumerate(unions)
        ]
        return least_loads(flat, slots[0], resident)
    total = 0
    for layer in range(layers):
        base = layer * experts
        here = [index - base for index in resident if base <= index < base + experts]
        total += least_loads(unions[layer::layers], slots[layer], here)
    return total


def count_least_loads(
    ids: Sequence[int],
    ends: Sequence[int],
    demands: int,
    slots: int,
    experts: int,
    kept: MutableSequence[int],
    next_use: MutableSequence[int],
    until: MutableSequence[int],
    members: MutableSequence[int],
) -> int:
    """``least_loads`` over flat sequences.

    Args:
        ids: experts of all demands; demand ``i`` is ``ids[ends[i - 1] : ends[i]]``.
        experts: ids are below this.
        kept: flags by id of what is held, at the start and then at the end.
        next_use, until, members: working memory, [ids], [experts], [experts].
    """
    find_next_uses(ids, ends, demands, experts, next_use, until)
    size = 0
    for expert in range(experts):
        if kept[expert]:
            members[size] = expert
            size += 1
    loads = place = 0
    for number in range(demands):
        while place < ends[number]:
            expert = ids[place]
            if not kept[expert]:
                loads += 1
                kept[expert] = 1
                members[size] = expert
                size += 1
            until[expert] = next_use[place]
            place += 1
        while size > slots:
            size = drop_farthest(members, size, kept, until)
    return loads


def find_next_uses(
    ids: Sequence[int],
    ends: Sequence[int],
    demands: int,
    experts: int,
    next_use: MutableSequence[int],
    until: MutableSequence[int],
) -> None:
    """For every demanded expert the number of its next demand, ``demands`` if there is none.

    Leaves the first demand of every expert in ``until``.
    """
    for expert in range(experts):
        until[expert] = demands
    for number in range(demands - 1, -1, -1):
        begin = ends[number - 1] if number > 0 else 0
        for place in range(begin, ends[number]):
            next_use[place] = until[ids[place]]
        for place in range(begin, ends[number]):
            until[ids[place]] = number


def drop_farthest(
    members: MutableSequence[int],
    size: int,
    kept: MutableSequence[int],
    until: Sequence[int],
) -> int:
    """Drop the member whose next use is farthest; returns the new size."""
    worst = 0
    for place in range(1, size):
        if until[members[place]] > until[members[worst]]:
            worst = place
    kept[members[worst]] = 0
    members[worst] = members[size - 1]
    return size - 1
