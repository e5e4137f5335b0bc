"""Miss counts against libcachesim, an independent cache library (GPL: used by tests only)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specter_sim.policies import EVICTION
from specter_sim.policies.state import State, new_state
from specter_sim.replay import replay_sequential

lcs: Any = pytest.importorskip(
    "libcachesim", reason="libcachesim is not installed: pip install '.[oracle]'"
)

TRACES, SIZES, LOOKUPS, EXPERTS = 300, (1, 2, 5, 9, 14), 150, 20
NEVER = -1


def lookups(seed: int) -> list[int]:
    """Skewed or flat, drifting or not: random lookups of 20 experts."""
    rng = np.random.default_rng(seed)
    weights = rng.random(EXPERTS) ** (seed % 5)
    ids = rng.choice(EXPERTS, LOOKUPS, p=weights / weights.sum())
    repeat = rng.random(LOOKUPS) < 0.1 * (seed % 4)
    for place in range(3, LOOKUPS):
        if repeat[place]:
            ids[place] = ids[place - 1 - int(rng.integers(3))]
    return [int(i) for i in ids]


def next_uses(ids: list[int]) -> list[int]:
    """The place of each lookup's next one of the same expert, or NEVER."""
    upcoming: dict[int, int] = {}
    places = [NEVER] * len(ids)
    for place in range(len(ids) - 1, -1, -1):
        places[place] = upcoming.get(ids[place], NEVER)
        upcoming[ids[place]] = place
    return places


def write_oracle_general(ids: list[int], path: Path) -> None:
    """The library's binary format: time u32, object u64, size u32, next access i64."""
    rows = zip(ids, next_uses(ids), strict=True)
    path.write_bytes(
        b"".join(struct.pack("<IQIq", t, i + 1, 1, after) for t, (i, after) in enumerate(rows))
    )


def their_misses(make: Callable[..., Any], path: Path, slots: int) -> int:
    reader = lcs.TraceReader(str(path), lcs.TraceType.ORACLE_GENERAL_TRACE)
    share, _ = make(slots, hashpower=8).process_trace(reader)  # the default table is 128 MiB
    misses = share * LOOKUPS
    assert abs(misses - round(misses)) < 1e-6
    return round(float(misses))


def our_misses(policy: str, ids: list[int], slots: int) -> int:
    state = state_for(policy, ids, slots)
    return replay_sequential(state, EVICTION[policy].rule, ids).misses


def state_for(policy: str, ids: list[int], slots: int) -> State:
    future = future_of(ids) if policy == "belady" else None
    return new_state(1, EXPERTS, 1, [slots], decay=1.0, forget=True, future=future)


def future_of(ids: list[int]) -> tuple[list[int], list[int]]:
    order = np.argsort(np.array(ids), kind="stable")
    begin = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=EXPERTS))])
    return begin.tolist(), order.tolist()


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "belady"])
def test_misses_equal_the_librarys_to_the_integer(policy: str, tmp_path: Path) -> None:
    make = {"lru": lcs.LRU, "lfu": lcs.LFU, "fifo": lcs.FIFO, "belady": lcs.Belady}[policy]
    path, differences = tmp_path / "lookups.oracleGeneral", []
    for seed in range(TRACES):
        ids = lookups(seed)
        write_oracle_general(ids, path)
        for slots in SIZES:
            ours, theirs = our_misses(policy, ids, slots), their_misses(make, path, slots)
            if ours != theirs:
                differences.append((seed, slots, ours, theirs))
    assert not differences, f"(seed, slots, ours, theirs): {differences[:5]}"


def test_the_traces_tell_the_policies_apart() -> None:
    """Otherwise equality above would say little."""
    for slots in SIZES[1:]:
        misses = {
            policy: sum(our_misses(policy, lookups(seed), slots) for seed in range(0, 40, 3))
            for policy in ("lru", "lfu", "fifo", "belady")
        }
        assert len(set(misses.values())) == 4
        assert misses["belady"] == min(misses.values())
