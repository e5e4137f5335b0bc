"""Rules by number: the same rule functions as every other world, chosen by an integer.

A compiled loop cannot be handed a function per run without being compiled per run, so each moment
of a rule has one dispatcher here. Adding a rule to the catalogue means adding its line here; the
order of a table is the rule's number.
"""

from __future__ import annotations

from specter_sim.offload import schedule
from specter_sim.policies.depth import choose_fixed
from specter_sim.policies.eviction import (
    belady,
    fifo,
    hot_lru,
    least_stale,
    lfu,
    lru,
    predicted_next_use,
    random,
)
from specter_sim.policies.governor import choose_governed, ended_governed
from specter_sim.policies.oracle_prefetch import began_oracle, routed_oracle
from specter_sim.policies.paper_planner import began_paper, copied_paper, drafted_paper
from specter_sim.policies.prefetch import (
    Memory,
    began_popular,
    began_stream,
    drafted_continuous,
    drafted_first_steps,
    drafted_once,
    routed_gate,
    routed_popular,
)
from specter_sim.policies.state import State

EVICTION_NUMBERS = {
    "lru": 0,
    "lfu": 1,
    "fifo": 2,
    "random": 3,
    "least-stale": 4,
    "hot-lru": 5,
    "predicted": 6,
    "belady": 7,
}
PREFETCH_NUMBERS = {
    "none": 0,
    "popularity": 1,
    "gate": 2,
    "draft-early": 3,
    "draft-late": 3,
    "draft-first": 4,
    "paper": 5,
    "continuous": 6,
    "stream": 7,
    "oracle": 8,
}
DEPTH_NUMBERS = {"never": 0, "fixed": 0, "profile": 0, "governor": 1}


def next_load(s: State, eviction: int) -> tuple[int, int, int, int]:
    """``schedule.next_load`` under the eviction rule of that number."""
    if eviction == 0:
        return schedule.next_load(s, lru)
    if eviction == 1:
        return schedule.next_load(s, lfu)
    if eviction == 2:
        return schedule.next_load(s, fifo)
    if eviction == 3:
        return schedule.next_load(s, random)
    if eviction == 4:
        return schedule.next_load(s, least_stale)
    if eviction == 5:
        return schedule.next_load(s, hot_lru)
    if eviction == 6:
        return schedule.next_load(s, predicted_next_use)
    return schedule.next_load(s, belady)


def began(s: State, prefetch: int, m: Memory) -> None:
    """A window began."""
    if prefetch == 1:
        began_popular(s, m)
    elif prefetch == 5:
        began_paper(s, m)
    elif prefetch == 7:
        began_stream(s, m)
    elif prefetch == 8:
        began_oracle(s, m)


def drafted(s: State, prefetch: int, m: Memory, step: int, seconds: float) -> None:
    """A draft step ended."""
    if prefetch == 3:
        drafted_once(s, m, step, seconds)
    elif prefetch == 4:
        drafted_first_steps(s, m, step, seconds)
    elif prefetch == 5:
        drafted_paper(s, m, step, seconds)
    elif prefetch == 6:
        drafted_continuous(s, m, step, seconds)


def routed(s: State, prefetch: int, m: Memory) -> None:
    """A layer's experts became known."""
    if prefetch == 1:
        routed_popular(s, m)
    elif prefetch == 2:
        routed_gate(s, m)
    elif prefetch == 8:
        routed_oracle(s, m)


def copied(s: State, prefetch: int, m: Memory, kind: int, seconds: float) -> None:
    """A load finished."""
    if prefetch == 5:
        copied_paper(s, m, kind, seconds)


def choose_depth(depth: int, m: Memory, limit: int) -> int:
    """The depth of the next window."""
    if depth == 1:
        return choose_governed(m, limit)
    return choose_fixed(m, limit)


def ended(
    rule: int,
    m: Memory,
    depth: int,
    accepted: int,
    draft_s: float,
    verify_s: float,
    demands: int,
    loads: int,
) -> None:
    """A window ended."""
    if rule == 1:
        ended_governed(m, depth, accepted, draft_s, verify_s, demands, loads)
