"""Lower bounds: the loads no schedule can avoid.

A clairvoyant cache serves the same demands in the same order. After each layer of each window it
may keep any of what it held and what it just used, so keeping the nearest next uses is optimal
(Belady's exchange argument for batches); it never loads what it does not need now.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def least_loads(unions: Sequence[Sequence[int]], slots: int, resident: Iterable[int] = ()) -> int:
    """The fewest loads that serve a sequence of demands with one pool of slots.

    Args:
        unions: the experts of each demand, any hashable ids, in order.
        slots: size of the pool; a demand may be larger, its overflow is simply not kept.
        resident: what is in the pool at the start.
    """
    never = len(unions)
    next_uses = next_use_table(unions, never)
    first = {}
    for place in range(never - 1, -1, -1):
        for expert in unions[place]:
            first[expert] = place
    kept = {expert: first.get(expert, never) for expert in resident}
    loads = 0
    for union, nexts in zip(unions, next_uses, strict=True):
        loads += sum(1 for expert in union if expert not in kept)
        kept.update(zip(union, nexts, strict=True))
        if len(kept) > slots:
            nearest = sorted(kept.items(), key=lambda item: item[1])[:slots]
            kept = dict(nearest)
    return loads


def next_use_table(unions: Sequence[Sequence[int]], never: int) -> list[list[int]]:
    """For every demanded expert, the place of its next demand, or ``never``."""
    upcoming: dict[int, int] = {}
    table: list[list[int]] = []
    for place in range(len(unions) - 1, -1, -1):
        union = unions[place]
        table.append([upcoming.get(expert, never) for expert in union])
        for expert in union:
            upcoming[expert] = place
    table.reverse()
    return table
