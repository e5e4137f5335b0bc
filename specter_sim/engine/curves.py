"""Hit rate against slots: what every eviction policy keeps of a trace's routes, clock left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specter_sim.engine import replay_kernels as kernels
from specter_traces import Trace

Ints = NDArray[np.int64]


class Lookups(StrEnum):
    """How a layer's experts are looked up."""

    BATCHED = "batched"  # a token's top-k at once; none of them is evicted for another
    SEQUENTIAL = "sequential"  # one after another, as a plain cache is tested; nothing is held


@dataclass(frozen=True, eq=False)
class Curve:
    """Hits of one policy.

    Attributes:
        slots: [N] slots a layer, ascending.
        hits: [L, N] hits of each layer.
        lookups: lookups of each layer.
    """

    policy: str
    slots: Ints
    hits: Ints
    lookups: int

    def hit_rate(self, layer: int | None = None) -> NDArray[np.float64]:
        """Hits per lookup at each number of slots, [N], of one layer or of all."""
        if layer is None:
            return np.asarray(self.hits.sum(axis=0) / (self.lookups * len(self.hits)))
        return np.asarray(self.hits[layer] / self.lookups)

    def knee(self, layer: int | None = None) -> int:
        """Where the curve is farthest above the chord between its ends, as a place in ``slots``.

        Both axes are scaled to their range first, so units do not matter. More slots than here
        bring less than the average slot does.
        """
        rate, slots = self.hit_rate(layer), self.slots.astype(np.float64)
        if len(slots) < 3 or rate[-1] == rate[0]:
            return 0
        height = (rate - rate[0]) / (rate[-1] - rate[0])
        return int(np.argmax(height - (slots - slots[0]) / (slots[-1] - slots[0])))


SEQUENTIAL_POLICIES = ("lru", "fifo", "lfu", "belady")
BATCHED_POLICIES = ("lru", "fifo", "lfu", "random", "least-stale", "belady")


def policies_of(lookups: Lookups) -> tuple[str, ...]:
    """The policies that have a curve: those that need the target's routes and nothing else.

    One by one there are no passes, so rules that count passes (fading LFU, least-stale) are left
    out or, as LFU, stand without fading: uses count while an expert is resident.
    """
    return BATCHED_POLICIES if lookups is Lookups.BATCHED else SEQUENTIAL_POLICIES


def sizes_of(trace: Trace, lookups: Lookups, count: int) -> list[int]:
    """About ``count`` evenly spaced numbers of slots, from the fewest that make sense to all."""
    least = least_slots(trace, lookups)
    spaced = np.linspace(least, trace.num_experts, max(2, count))
    return sorted({round(float(slots)) for slots in spaced})


def least_slots(trace: Trace, lookups: Lookups) -> int:
    """One slot, or one for each expert of a token: with fewer a layer would run in rounds."""
    return trace.top_k if lookups is Lookups.BATCHED else 1


def cache_curves(
    trace: Trace,
    lookups: Lookups = Lookups.BATCHED,
    policies: Sequence[str] | None = None,
    *,
    sizes: Sequence[int] | None = None,
    warm: bool = False,
    workers: int = 1,
) -> Iterator[Curve]:
    """The curve of every policy, in order, each as soon as it is known.

    LRU comes at all sizes out of one pass; so do FIFO and Belady when lookups are sequential.
    The others are replayed at each of ``sizes`` (all by default).

    Args:
        warm: keep the cache from one sequence to the next; otherwise each starts empty.
        workers: threads that replay.
    """
    every = list(range(least_slots(trace, lookups), trace.num_experts + 1))
    chosen = every if sizes is None else list(sizes)
    with ThreadPoolExecutor(workers) as pool:
        for policy in policies_of(lookups) if policies is None else policies:
            if lookups is Lookups.SEQUENTIAL:
                yield _sequential(trace, policy, every, chosen, warm, pool)
            elif policy == "lru":
                yield _lru(trace, lookups, every, warm, pool)
            else:
                yield _by_rule(trace, policy, chosen, warm, pool)


def layer_ids(trace: Trace) -> NDArray[np.uint16]:
    """Each layer's lookups in order, ascending within a token, [L, T*K]."""
    rows = np.sort(trace.target_ids, axis=2).transpose(1, 0, 2)
    return np.ascontiguousarray(rows, dtype=np.uint16).reshape(trace.num_layers, -1)


def lookup_starts(trace: Trace, warm: bool) -> Ints:
    """Where each sequence starts in a layer's lookups; one start when the cache stays warm."""
    offsets = trace.sequence_offsets.astype(np.int64) * trace.top_k
    return offsets[[0, -1]] if warm else offsets


def _lru(
    trace: Trace, lookups: Lookups, sizes: Sequence[int], warm: bool, pool: ThreadPoolExecutor
) -> Curve:
    starts, which = lookup_starts(trace, warm), lookups is Lookups.BATCHED
    distances = pool.map(
        lambda ids: kernels.lru_distances(ids, starts, trace.num_experts, trace.top_k)[which],
        layer_ids(trace),
    )
    return _from_distances("lru", trace, list(distances), sizes)


def _sequential(
    trace: Trace,
    policy: str,
    every: Sequence[int],
    chosen: Sequence[int],
    warm: bool,
    pool: ThreadPoolExecutor,
) -> Curve:
    starts, experts, ids = lookup_starts(trace, warm), trace.num_experts, layer_ids(trace)
    if policy == "lru":
        return _lru(trace, Lookups.SEQUENTIAL, every, warm, pool)
    if policy == "belady":
        find = partial(kernels.belady_distances, starts=starts, experts=experts)
        return _from_distances(policy, trace, list(pool.map(find, ids)), every)
    if policy == "fifo":
        sizes = np.array(every, dtype=np.int64)
        count = partial(kernels.fifo_misses, starts=starts, experts=experts, slots=sizes)
        return _from_misses(policy, trace, list(pool.map(count, ids)), every)
    tasks = [(layer, slots) for layer in ids for slots in chosen]
    misses = pool.map(lambda task: kernels.lfu_misses(task[0], starts, experts, task[1]), tasks)
    table = np.array(list(misses)).reshape(len(ids), -1)
    return _from_misses(policy, trace, list(table), chosen)


def _by_rule(
    trace: Trace, policy: str, sizes: Sequence[int], warm: bool, pool: ThreadPoolExecutor
) -> Curve:
    from specter_sim.engine.rule_replay import rule_hits  # compiles the rules

    by_size = pool.map(lambda slots: rule_hits(trace, policy, slots, warm), sizes)
    hits = np.stack(list(by_size), axis=1)
    return Curve(policy, np.array(sizes, dtype=np.int64), hits, _lookups(trace))


def _from_distances(
    policy: str, trace: Trace, distances: Sequence[Ints], sizes: Sequence[int]
) -> Curve:
    """A cache of ``c`` slots hits the lookups whose distance is below ``c``."""
    slots = np.array(sizes, dtype=np.int64)
    hits = np.cumsum(np.stack(distances), axis=1)[:, slots - 1]
    return Curve(policy, slots, hits, _lookups(trace))


def _from_misses(policy: str, trace: Trace, misses: Sequence[Ints], sizes: Sequence[int]) -> Curve:
    hits = _lookups(trace) - np.stack(misses)
    return Curve(policy, np.array(sizes, dtype=np.int64), hits, _lookups(trace))


def _lookups(trace: Trace) -> int:
    return trace.num_positions * trace.top_k
