"""Cache curves against the rule functions, and what must hold of any curve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import random_trace

from specter_sim.engine.curves import (
    Curve,
    Lookups,
    cache_curves,
    layer_ids,
    policies_of,
    sizes_of,
)
from specter_sim.engine.rule_replay import POLICIES, rule_hits
from specter_sim.policies import EVICTION
from specter_sim.policies.state import State, new_state
from specter_sim.replay import replay_batched, replay_sequential
from specter_traces import Trace, bundled

BOTH = pytest.mark.parametrize("lookups", list(Lookups))
WARM = pytest.mark.parametrize("warm", [False, True])


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Three sequences of a real model."""
    return bundled("tiny-moe-base4").select([0, 7, 20])


def curves_of(trace: Trace, lookups: Lookups, warm: bool = False) -> dict[str, Curve]:
    sizes = sizes_of(trace, lookups, 5)
    return {c.policy: c for c in cache_curves(trace, lookups, sizes=sizes, warm=warm)}


def texts_of(trace: Trace, warm: bool) -> list[Trace]:
    """What is replayed from an empty cache: every sequence, or the whole trace once."""
    return [trace] if warm else list(trace)


def state_for(policy: str, trace: Trace, slots: int, forget: bool, sequential: bool) -> State:
    params = EVICTION[policy].params
    decay = 1.0 if sequential or "decay" not in params else float(params["decay"].default)
    shape = (trace.num_layers, trace.num_experts, trace.top_k)
    future = None
    if policy == "belady":
        flat = lookups_of(trace)
        order = np.argsort(flat, kind="stable")
        begin = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=shape[0] * shape[1]))])
        places = order if sequential else order // (shape[0] * shape[2])
        future = (begin.tolist(), places.tolist())
    counts = [slots] * trace.num_layers
    return new_state(*shape, counts, decay=decay, forget=forget, future=future)


def lookups_of(trace: Trace) -> Any:
    """Flat indices in the order of decoding, ascending within a token's layer."""
    first = trace.num_experts * np.arange(trace.num_layers)[None, :, None]
    return (np.sort(trace.target_ids, axis=2).astype(np.int64) + first).ravel()


def sequential_hits(policy: str, trace: Trace, slots: int, warm: bool) -> int:
    return sum(
        replay_sequential(
            state_for(policy, text, slots, forget=True, sequential=True),
            EVICTION[policy].rule,
            lookups_of(text).tolist(),
        ).hits
        for text in texts_of(trace, warm)
    )


def batched_hits(policy: str, trace: Trace, slots: int, warm: bool) -> int:
    return sum(
        replay_batched(
            state_for(policy, text, slots, forget=False, sequential=False),
            EVICTION[policy].rule,
            np.sort(text.target_ids, axis=2).tolist(),
        ).hits
        for text in texts_of(trace, warm)
    )


@WARM
def test_sequential_curves_equal_the_rules_to_the_integer(trace: Trace, warm: bool) -> None:
    curves = curves_of(trace, Lookups.SEQUENTIAL, warm)
    assert tuple(curves) == policies_of(Lookups.SEQUENTIAL)
    for policy, curve in curves.items():
        for place in range(0, len(curve.slots), max(1, len(curve.slots) // 4)):
            slots = int(curve.slots[place])
            hits = sequential_hits(policy, trace, slots, warm)
            assert curve.hits[:, place].sum() == hits, (policy, slots)


@WARM
def test_batched_curves_equal_the_rules_to_the_integer(trace: Trace, warm: bool) -> None:
    curves = curves_of(trace, Lookups.BATCHED, warm)
    assert tuple(curves) == policies_of(Lookups.BATCHED) == POLICIES
    for policy, curve in curves.items():
        for slots in (6, 16, 38):
            place = curve.slots.tolist().index(slots)
            hits = batched_hits(policy, trace, slots, warm)
            assert curve.hits[:, place].sum() == hits, (policy, slots)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 999),
    slots=st.integers(1, 9),
    policy=st.sampled_from(POLICIES),
    top_k=st.integers(1, 4),
)
def test_compiled_rules_count_what_interpreted_ones_do(
    seed: int, slots: int, policy: str, top_k: int
) -> None:
    """Also with fewer slots than a token needs, in rounds."""
    trace = random_trace(25, 2, 9, top_k, sequences=2, seed=seed)
    hits = rule_hits(trace, policy, slots, warm=False)
    assert hits.sum() == batched_hits(policy, trace, slots, warm=False)


def test_both_lru_curves_agree_with_the_rule(trace: Trace) -> None:
    """One pass over stack distances, and a replay of each size by the rule."""
    curve = curves_of(trace, Lookups.BATCHED)["lru"]
    for slots in (6, 20, 48):
        place = curve.slots.tolist().index(slots)
        assert np.array_equal(curve.hits[:, place], rule_hits(trace, "lru", slots, warm=False))


@BOTH
def test_no_policy_beats_belady_and_all_meet_at_the_ends(trace: Trace, lookups: Lookups) -> None:
    curves = curves_of(trace, lookups)
    bound = dict(zip(curves["belady"].slots.tolist(), curves["belady"].hit_rate(), strict=True))
    for curve in curves.values():
        rate = dict(zip(curve.slots.tolist(), curve.hit_rate(), strict=True))
        assert all(rate[slots] <= bound[slots] for slots in rate if slots in bound)
        assert rate[48] == bound[48]
    first = {c.hits[:, 0].sum() for c in curves.values()}
    assert len(first) == 1  # nothing to choose: the least number of slots holds one token


@BOTH
def test_more_slots_never_hurt_a_stack_algorithm(trace: Trace, lookups: Lookups) -> None:
    for policy in ("lru", "belady"):
        curve = curves_of(trace, lookups)[policy]
        assert (np.diff(curve.hits, axis=1) >= 0).all()


def test_a_warm_cache_hits_more(trace: Trace) -> None:
    for lookups in Lookups:
        cold, warm = (curves_of(trace, lookups, w)["lru"].hit_rate() for w in (False, True))
        assert (warm >= cold).all() and warm[-1] > cold[-1]


def test_threads_change_nothing(trace: Trace) -> None:
    alone = list(cache_curves(trace, sizes=[6, 30]))
    together = list(cache_curves(trace, sizes=[6, 30], workers=4))
    for one, other in zip(alone, together, strict=True):
        assert one.policy == other.policy and np.array_equal(one.hits, other.hits)


def test_the_knee_is_farthest_from_the_chord() -> None:
    slots = np.arange(1, 11)
    bent = np.minimum(slots, 4) * 100 + slots
    curve = Curve("lru", slots, np.stack([bent, 10 * slots]), lookups=1000)
    assert curve.slots[curve.knee(0)] == 4
    assert curve.knee(1) == 0  # a straight line has none
    wide = replace(curve, slots=7 * slots, hits=3 * curve.hits, lookups=9000)
    assert wide.knee(0) == curve.knee(0)  # units do not matter
    flat = replace(curve, hits=np.full((1, 10), 5))
    assert flat.knee() == 0


def test_sizes_span_from_one_token_to_all_experts(trace: Trace) -> None:
    assert sizes_of(trace, Lookups.BATCHED, 4) == [6, 20, 34, 48]
    assert sizes_of(trace, Lookups.SEQUENTIAL, 2) == [1, 48]
    assert sizes_of(trace, Lookups.BATCHED, 999) == list(range(6, 49))


def test_lookups_are_laid_out_by_layer(trace: Trace) -> None:
    ids = layer_ids(trace)
    assert ids.shape == (8, trace.num_positions * 6)
    assert ids[3, 6:12].tolist() == sorted(trace.target_ids[1, 3].tolist())
