"""From a configuration to live rules: which run, what they are given, where they start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from live import config_of

from specter_runtime.live_rules import (
    Policies,
    live_policies,
    live_rules,
    live_state,
    needs_popularity,
)
from specter_sim.policies import DEPTH, EVICTION, PREFETCH
from specter_sim.policies.state import ABSENT, DECAY, FORGET, RESIDENT, SEED, State
from specter_sim.setup.rules import Expectation
from specter_traces import UsageError

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def policies_of(**dotted: Any) -> Policies:
    return live_policies(config_of(**dotted))


@pytest.mark.parametrize(
    ("depth", "drafts", "deepest"),
    [("never", False, 0), (0, False, 0), (1, True, 1), (7, True, 7), ("governor", True, 16)],
)
def test_depth_says_whether_and_how_deep_a_draft_runs(
    depth: str | int, drafts: bool, deepest: int
) -> None:
    policies = policies_of(policy__depth=depth)
    assert policies.drafts is drafts
    assert policies.deepest == deepest


def test_a_governor_goes_as_deep_as_it_is_told() -> None:
    given = policies_of(policy__depth="governor", policy__depth_params={"most": 5})
    assert given.deepest == 5


def test_exactly_the_rules_that_know_the_future_are_refused() -> None:
    for kind, known in (("eviction", EVICTION), ("prefetch", PREFETCH)):
        for name, info in known.items():
            keys = {f"policy__{kind}": name, "policy__depth": 2, "memory__layout": "global"}
            if "future" in info.needs:
                with pytest.raises(UsageError, match=f'"{name}" reads the future'):
                    policies_of(**keys)
            else:
                assert getattr(policies_of(**keys), kind) is info
    with pytest.raises(UsageError, match="measured by specter-sim"):
        policies_of(policy__depth="profile")
    assert {name for name in DEPTH if name != "profile"} >= {"never", "governor"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy__prefetch": "continuous", "policy__depth": 0}, "follows a draft"),
        ({"policy__demand": "staging"}, "needs transient slots"),
        ({"policy__prefetch": "stream"}, 'set memory.layout = "global"'),
        (
            {"policy__depth": "governor", "policy__depth_params": {"deepest": 3}},
            'no parameter "deepest"',
        ),
        ({"policy__eviction": "lrv"}, "lru"),
    ],
)
def test_combinations_without_a_meaning_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        policies_of(**settings)


def test_gate_and_stream_are_known_by_their_prefetch() -> None:
    assert policies_of(policy__prefetch="gate").uses_gate
    streaming = policies_of(policy__prefetch="stream", memory__layout="global")
    assert streaming.streams and not streaming.uses_gate
    assert not policies_of().streams and not policies_of().uses_gate


@pytest.mark.parametrize(
    ("settings", "wanting"),
    [
        ({}, ""),
        ({"memory__initial": "popular"}, "memory.initial"),
        ({"policy__eviction": "hot-lru"}, "hot-lru"),
        ({"policy__prefetch": "popularity"}, ""),  # it counts uses itself
        # Streaming keeps the first layers, whatever is popular.
        (
            {
                "policy__eviction": "hot-lru",
                "policy__prefetch": "stream",
                "memory__layout": "global",
            },
            "",
        ),
    ],
)
def test_what_has_to_know_popularity_says_so(settings: dict[str, Any], wanting: str) -> None:
    config = config_of(**settings)
    found = needs_popularity(config, live_policies(config))
    assert wanting in found and bool(found) == bool(wanting)


# --- rules


def expectation(most: int) -> Expectation:
    depths = [float(depth) for depth in range(most + 1)]
    return Expectation(depths, depths, depths, 1e-3)


def test_a_governor_alone_is_told_what_to_expect() -> None:
    asked: list[int] = []

    def expect(most: int) -> Expectation:
        asked.append(most)
        return expectation(most)

    live_rules(policies_of(policy__depth=4), 100, expect)
    assert asked == []
    params = {"most": 6}
    live_rules(policies_of(policy__depth="governor", policy__depth_params=params), 100, expect)
    assert asked == [6]


@pytest.mark.parametrize(("depth", "chosen"), [("never", 0), (0, 0), (3, 3), (9, 5)])
def test_a_fixed_depth_is_kept_as_far_as_the_text_allows(depth: str | int, chosen: int) -> None:
    rules = live_rules(policies_of(policy__depth=depth), 100, expectation)
    assert rules.depth.choose(list(rules.depth_memory), 5) == chosen


def test_rules_are_the_simulators_own_functions() -> None:
    settings = {"policy__eviction": "lfu", "policy__prefetch": "continuous", "policy__depth": 2}
    rules = live_rules(policies_of(**settings), 100, expectation)
    assert rules.victim_key is EVICTION["lfu"].rule
    assert rules.prefetch is PREFETCH["continuous"].rule


# --- the device before the first request


def state_of(groups: tuple[int, ...], uses: Any = None, **dotted: Any) -> State:
    config = config_of(**dotted)
    popularity = np.zeros((LAYERS, EXPERTS)) if uses is None else np.array(uses, dtype=float)
    return live_state(config, live_policies(config), groups, 2, TOP_K, popularity)


def residents(state: State) -> list[list[int]]:
    """Ids of the resident experts of each layer, each of which has its slot."""
    for index, where in enumerate(state.residency):
        assert where in (ABSENT, RESIDENT)
        if where == RESIDENT:
            assert state.occupant[state.slot_of[index]] == index
    flags = np.array(state.residency).reshape(LAYERS, EXPERTS) == RESIDENT
    return [np.flatnonzero(row).tolist() for row in flags]


def test_a_cold_device_is_empty() -> None:
    state = state_of((3, 4, 5), policy__eviction="lru")
    assert residents(state) == [[], [], []]
    assert list(state.free) == [3, 4, 5, 2]
    assert (state.layers, state.experts, state.groups, state.top_k) == (3, 8, 3, 2)


def test_the_highest_ids_fill_each_layers_slots() -> None:
    state = state_of((2, 3, 1), memory__initial="highest")
    assert residents(state) == [[6, 7], [5, 6, 7], [7]]
    assert list(state.free) == [0, 0, 0, 2]


def test_the_popular_fill_an_even_share_of_a_pool() -> None:
    uses = [[0, 9, 0, 0, 8, 0, 0, 0], [7, 6, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 2]]
    settings: dict[str, Any] = {"memory__layout": "global", "memory__initial": "popular"}
    state = state_of((7,), uses, **settings)
    assert residents(state) == [[1, 4], [0, 1], [6, 7]]
    assert list(state.free) == [1, 2]


def test_knobs_come_from_the_parameters() -> None:
    params = {"decay": 0.25, "forget": True}
    settings: dict[str, Any] = {"policy__eviction_params": params, "trace__seed": 7}
    state = state_of((4, 4, 4), policy__eviction="lfu", **settings)
    assert (state.knobs[DECAY], state.knobs[FORGET], state.knobs[SEED]) == (0.25, 1, 7)
