"""Hit-only replays of one layer, as fast as we know how.

The rules are those of ``policies.eviction``; what differs is the data structure. A rule ranks
residents by a key; here the residents of a layer are kept in the order of that key, or their keys
side by side, so that a victim costs a scan over a few cache lines and no call. That the counts are
those of the rule functions is a property test (tests/test_replay_kernels.py).

All kernels replay lookups one by one (``lru_distances`` also whole rows) and empty the cache
where a sequence starts.

Args, wherever they occur:
    ids: uint16 [n], the experts that one layer looks up, in order.
    starts: int64 [S+1], where each sequence starts in ``ids``; the last entry is n.
    experts: ids are below this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from specter_sim.engine.compile import use_cache_folder

use_cache_folder()

from numba import njit  # noqa: E402

Function = TypeVar("Function", bound=Callable[..., object])
Ids = NDArray[np.uint16]
Places = NDArray[np.int64]
Counts = NDArray[np.int64]

# Arrays that are scanned are padded to a multiple of this, so that the vectorized loop has no
# rest to do one by one.
_LANES = 64


def compiled(function: Function) -> Function:
    """Compile when first called; kept in the cache folder, and other threads may run meanwhile."""
    return cast(Function, njit(cache=True, nogil=True, error_model="numpy")(function))


def lru_distances(ids: Ids, starts: Places, experts: int, top_k: int) -> tuple[Counts, Counts]:
    """How many lookups have each LRU stack distance: (one by one, row by row), each [experts+1].

    The distance of a lookup is the number of other experts used since the last use of this one,
    so a cache of ``c`` slots hits exactly the lookups with a distance below ``c``: all sizes in
    one pass (Mattson 1970). First lookups are in the last entry.

    Row by row, the ``top_k`` distinct experts of a row are looked up at once, before any of them
    is moved, and none of them is evicted for another: right for ``c >= top_k``.
    """
    padded = -(-experts // _LANES) * _LANES
    single = np.zeros(experts + 1, dtype=np.int64)
    batched = np.zeros(experts + 1, dtype=np.int64)
    _lru_distances(ids, starts, top_k, np.zeros(padded, dtype=np.int32), single, batched)
    return single, batched


def belady_distances(ids: Ids, starts: Places, experts: int) -> Counts:
    """How many lookups hit from each number of slots on under Belady's MIN, [experts+1].

    MIN is a stack algorithm too (Mattson 1970): entry ``d`` counts the lookups that hit if and
    only if there are more than ``d`` slots; the last entry, those that never do.
    """
    found = np.zeros(experts + 1, dtype=np.int64)
    next_use = next_uses(ids, starts, experts)
    _belady_distances(next_use, starts, np.zeros(experts, dtype=np.int32), found)
    return found


def fifo_misses(ids: Ids, starts: Places, experts: int, slots: Counts) -> Counts:
    """Misses of first in, first out for every entry of ``slots``, in one pass.

    FIFO holds the last ``c`` experts that it loaded: an expert is resident if and only if it was
    among the last ``c`` misses.
    """
    sizes = slots.astype(np.int32)
    misses = np.zeros(len(sizes), dtype=np.int32)
    loaded = np.zeros(experts * len(sizes), dtype=np.int32)
    total = np.zeros(len(sizes), dtype=np.int64)
    _fifo_misses(ids, starts, sizes, loaded, misses, total)
    return total


def lru_misses(ids: Ids, starts: Places, experts: int, slots: int) -> int:
    """Misses of least recently used with that many slots."""
    when = np.zeros(_padded(slots), dtype=np.int32)
    return int(_lru_misses(ids, starts, slots, np.zeros(experts, dtype=np.int64), when))


def lfu_misses(ids: Ids, starts: Places, experts: int, slots: int, forget: bool = True) -> int:
    """Misses of least frequently used; uses do not fade, an evicted expert may lose them.

    A slot's key is its expert's uses, then its last use: what ``find_slot`` compares.
    """
    key = np.zeros(_padded(slots), dtype=np.int64)
    slot_of, uses = np.zeros((2, experts), dtype=np.int64)
    return int(_lfu_misses(ids, starts, slots, forget, slot_of, uses, key))


def next_uses(ids: Ids, starts: Places, experts: int) -> NDArray[np.int32]:
    """Where each lookup's expert is looked up next in its sequence; if nowhere, n + its id."""
    next_use = np.zeros(len(ids), dtype=np.int32)
    _next_uses(ids, starts, np.zeros(experts, dtype=np.int32), next_use)
    return next_use


def _padded(slots: int) -> int:
    return -(-slots // _LANES) * _LANES


@compiled
def _lru_distances(
    ids: Ids,
    starts: Places,
    top_k: int,
    last: NDArray[np.int32],
    single: Counts,
    batched: Counts,
) -> None:
    cold = single.size - 1
    for sequence in range(starts.size - 1):
        last[:] = -1  # never used; the padding stays so
        for row in range(starts[sequence], starts[sequence + 1], top_k):
            for rank in range(top_k):
                mine = last[ids[row + rank]]
                newer = np.int32(0)
                for expert in range(last.size):
                    newer += np.int32(last[expert] > mine)
                overtaken = 0  # by experts of the same row that come before this one
                for other in range(rank):
                    overtaken += int(last[ids[row + other]] < mine)
                if mine < 0:
                    single[cold] += 1
                    batched[cold] += 1
                else:
                    single[newer + overtaken] += 1
                    batched[newer] += 1
            for rank in range(top_k):
                last[ids[row + rank]] = row + rank


@compiled
def _next_uses(
    ids: Ids, starts: Places, upcoming: NDArray[np.int32], next_use: NDArray[np.int32]
) -> None:
    for sequence in range(starts.size - 1):
        for expert in range(upcoming.size):
            upcoming[expert] = ids.size + expert  # never, but still one number an expert
        for place in range(starts[sequence + 1] - 1, starts[sequence] - 1, -1):
            next_use[place] = upcoming[ids[place]]
            upcoming[ids[place]] = place


@compiled
def _belady_distances(
    next_use: NDArray[np.int32], starts: Places, stack: NDArray[np.int32], found: Counts
) -> None:
    for sequence in range(starts.size - 1):
        size = 0
        for place in range(starts[sequence], starts[sequence + 1]):
            # The stack holds next uses: the expert looked up now is the entry that says "now".
            # It goes on top; of each two that meet on the way down, the farther one sinks.
            carried, depth = next_use[place], 0
            while depth < size and stack[depth] != place:
                if depth == 0:
                    carried, stack[0] = stack[0], carried
                else:
                    kept = min(carried, stack[depth])
                    carried = max(carried, stack[depth])
                    stack[depth] = kept
                depth += 1
            if depth == size:
                size += 1
                found[found.size - 1] += 1
            else:
                found[depth] += 1
            stack[depth] = carried


@compiled
def _fifo_misses(
    ids: Ids,
    starts: Places,
    slots: NDArray[np.int32],
    loaded: NDArray[np.int32],
    misses: NDArray[np.int32],
    total: Counts,
) -> None:
    sizes = slots.size
    for sequence in range(starts.size - 1):
        loaded[:] = -(1 << 30)  # longer ago than any number of slots
        misses[:] = 0
        for place in range(starts[sequence], starts[sequence + 1]):
            row = np.int64(ids[place]) * sizes
            for size in range(sizes):
                mine, count = loaded[row + size], misses[size]
                missed = np.int32(count - mine) > slots[size]
                loaded[row + size] = count if missed else mine
                misses[size] = count + np.int32(missed)
        for size in range(sizes):
            total[size] += misses[size]


@compiled
def _lru_misses(
    ids: Ids, starts: Places, slots: int, slot_of: Places, when: NDArray[np.int32]
) -> int:
    misses = 0
    for sequence in range(starts.size - 1):
        slot_of[:] = -1
        when[:] = 2**31 - 1  # padding is never the oldest
        used = 0
        for place in range(starts[sequence], starts[sequence + 1]):
            slot = slot_of[ids[place]]
            if slot < 0:
                misses += 1
                if used < slots:
                    slot = used
                    used += 1
                else:
                    oldest = when[0]
                    for other in range(when.size):
                        oldest = min(oldest, when[other])
                    victim = ids[oldest]  # a slot's last use names its expert
                    slot = slot_of[victim]
                    slot_of[victim] = -1
                slot_of[ids[place]] = slot
            when[slot] = place
    return misses


@compiled
def _lfu_misses(
    ids: Ids,
    starts: Places,
    slots: int,
    forget: bool,
    slot_of: Places,
    uses: Places,
    key: Places,
) -> int:
    misses = 0
    for sequence in range(starts.size - 1):
        slot_of[:] = -1
        uses[:] = 0
        key[:] = (1 << 63) - 1
        used = 0
        for place in range(starts[sequence], starts[sequence + 1]):
            expert = ids[place]
            slot = slot_of[expert]
            if slot < 0:
                misses += 1
                if used < slots:
                    slot = used
                    used += 1
                else:
                    least = key[0]
                    for other in range(key.size):
                        least = min(least, key[other])
                    victim = ids[least & 0xFFFFFFFF]
                    slot = slot_of[victim]
                    slot_of[victim] = -1
                    if forget:
                        uses[victim] = 0
                slot_of[expert] = slot
            uses[expert] += 1
            key[slot] = uses[expert] << 32 | place
    return misses
