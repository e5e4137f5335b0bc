"""The fast replays against the rule functions, and against an independent cache library."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_sim.engine import replay_kernels as kernels
from specter_sim.policies import EVICTION
from specter_sim.policies.state import new_state
from specter_sim.replay import replay_batched, replay_sequential

Ids = list[int]
POLICIES = ("lru", "fifo", "lfu", "belady")


def fast_misses(policy: str, sequences: list[Ids], experts: int, slots: int) -> int:
    """Misses by the kernel of a policy."""
    ids, starts = flat(sequences)
    if policy == "fifo":
        return int(kernels.fifo_misses(ids, starts, experts, np.array([slots]))[0])
    if policy == "belady":
        return int(kernels.belady_distances(ids, starts, experts)[slots:].sum())
    if policy == "lru":
        return kernels.lru_misses(ids, starts, experts, slots)
    return kernels.lfu_misses(ids, starts, experts, slots)


def flat(sequences: list[Ids]) -> tuple[Any, Any]:
    """Lookups of all sequences, and where each begins."""
    starts = np.cumsum([0, *map(len, sequences)])
    return np.array([i for ids in sequences for i in ids], dtype=np.uint16), starts


def rule_misses(policy: str, ids: Ids, experts: int, slots: int, forget: bool = True) -> int:
    """Misses by the rule function over the flat state."""
    order = np.argsort(np.array(ids, dtype=np.int64), kind="stable").tolist()
    begin = np.concatenate([[0], np.cumsum(np.bincount(ids, minlength=experts))]).tolist()
    future = (begin, order) if policy == "belady" else None
    state = new_state(1, experts, 1, [slots], decay=1.0, forget=forget, future=future)
    return replay_sequential(state, EVICTION[policy].rule, ids).misses


@st.composite
def lookups(draw: st.DrawFn) -> tuple[list[Ids], int]:
    """Some sequences of lookups, skewed or flat, and the number of experts."""
    experts = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.random(experts) ** draw(st.integers(0, 6)) + 1e-9
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    share = weights / weights.sum()
    return [rng.choice(experts, length, p=share).tolist() for length in lengths], experts


@settings(max_examples=60, deadline=None)
@given(lookups(), st.sampled_from(POLICIES), st.integers(1, 70))
def test_misses_equal_those_of_the_rule(
    drawn: tuple[list[Ids], int], policy: str, slots: int
) -> None:
    sequences, experts = drawn
    slots = min(slots, experts)
    expected = sum(rule_misses(policy, ids, experts, slots) for ids in sequences if ids)
    assert fast_misses(policy, sequences, experts, slots) == expected


@settings(max_examples=20, deadline=None)
@given(lookups(), st.integers(1, 20))
def test_uses_may_outlive_an_eviction(drawn: tuple[list[Ids], int], slots: int) -> None:
    sequences, experts = drawn
    ids, starts = flat(sequences)
    got = kernels.lfu_misses(ids, starts, experts, slots, forget=False)
    misses = [rule_misses("lfu", one, experts, slots, forget=False) for one in sequences if one]
    assert got == sum(misses)


@settings(max_examples=30, deadline=None)
@given(lookups())
def test_the_lru_curve_is_that_of_the_rule_at_every_size(drawn: tuple[list[Ids], int]) -> None:
    sequences, experts = drawn
    ids, starts = flat(sequences)
    single, batched = kernels.lru_distances(ids, starts, experts, top_k=1)
    assert np.array_equal(single, batched)  # a row of one
    for slots in range(1, experts + 1, 3):
        expected = sum(rule_misses("lru", one, experts, slots) for one in sequences if one)
        assert single[slots:].sum() == expected
        assert kernels.lru_misses(ids, starts, experts, slots) == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(5, 40), st.integers(1, 60))
def test_rows_are_looked_up_at_once_or_one_by_one(
    seed: int, top_k: int, experts: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    score = rng.random((rows, experts)) * rng.random(experts) ** 3
    table = np.sort(np.argsort(-score, axis=1)[:, :top_k], axis=1)
    starts = np.array([0, top_k * (rows // 2), top_k * rows])
    single, batched = kernels.lru_distances(table.ravel().astype(np.uint16), starts, experts, top_k)
    halves = table[: rows // 2].tolist(), table[rows // 2 :].tolist()
    flat_halves = [[expert for row in half for expert in row] for half in halves]
    for slots in range(top_k, experts + 1, 4):
        misses = [
            replay_batched(
                new_state(1, experts, top_k, [slots]),
                EVICTION["lru"].rule,
                [[row] for row in half],
            ).misses
            for half in halves
        ]
        assert batched[slots:].sum() == sum(misses)
        one_by_one = [rule_misses("lru", one, experts, slots) for one in flat_halves if one]
        assert single[slots:].sum() == sum(one_by_one)


def test_all_fifo_sizes_in_one_pass_equal_each_alone() -> None:
    ids = np.random.default_rng(3).integers(0, 24, 500).astype(np.uint16) ** 2 % 24
    starts = np.array([0, 200, 500])
    sizes = np.array([1, 5, 9, 24, 2])
    together = kernels.fifo_misses(ids, starts, 24, sizes)
    alone = [kernels.fifo_misses(ids, starts, 24, np.array([size]))[0] for size in sizes]
    assert together.tolist() == alone
    assert together[3] == sum(len(set(part.tolist())) for part in (ids[:200], ids[200:]))


@pytest.mark.parametrize("policy", POLICIES)
def test_misses_equal_an_independent_librarys(policy: str, tmp_path: Path) -> None:
    lcs: Any = pytest.importorskip("libcachesim", reason="pip install '.[oracle]'")
    makers: dict[str, Callable[..., Any]]
    makers = {"lru": lcs.LRU, "fifo": lcs.FIFO, "lfu": lcs.LFU, "belady": lcs.Belady}
    rng = np.random.default_rng(0)
    experts, path = 128, tmp_path / "lookups.oracleGeneral"
    for spread in (0, 2, 5):
        weights = rng.random(experts) ** spread
        ids = rng.choice(experts, 5000, p=weights / weights.sum())
        write_oracle_general(ids.astype(np.uint16), path)
        for slots in (1, 7, 32, 100):
            reader = lcs.TraceReader(str(path), lcs.TraceType.ORACLE_GENERAL_TRACE)
            share, _ = makers[policy](slots, hashpower=8).process_trace(reader)
            assert fast_misses(policy, [ids.tolist()], experts, slots) == round(share * len(ids))


def write_oracle_general(ids: Any, path: Path) -> None:
    """The library's binary format: time u32, object u64, size u32, next access i64."""
    upcoming = kernels.next_uses(ids, np.array([0, len(ids)]), 128)
    rows = zip(ids.tolist(), upcoming.tolist(), strict=True)
    path.write_bytes(
        b"".join(
            struct.pack("<IQIq", t, i + 1, 1, after if after < len(ids) else -1)
            for t, (i, after) in enumerate(rows)
        )
    )
