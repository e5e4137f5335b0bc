"""The compiled engine against the SimPy world: the same journal, entry by entry, the same times."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from routes import random_trace, setup_of

from specter_sim.config import build
from specter_sim.engine.journal import Flat, entries_of, flat_entry
from specter_sim.engine.rules import DEPTH_NUMBERS, EVICTION_NUMBERS, PREFETCH_NUMBERS
from specter_sim.engine.run import serve, simulate_compiled, summarize_block, why_not
from specter_sim.policies import DEPTH, EVICTION, PREFETCH
from specter_sim.presets import PRESETS
from specter_sim.setup import Setup, resolve
from specter_sim.sim import World, simulate

RUNS, BATCH = 1000, 50
JOURNAL_ROOM = 200_000
CLOSE = 1e-9


def random_setup(seed: int) -> Setup:
    """Any policies, forms, depths, layouts, links and traces."""
    rng = np.random.default_rng(seed)

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    layers, experts = pick((1, 6), (2, 8), (3, 8))
    trace = random_trace(
        tokens=24,
        layers=layers,
        experts=experts,
        sequences=pick(1, 2),
        prompt=pick(0, 5),
        locality=pick(0.3, 0.8),
        seed=int(rng.integers(8)),
    )
    depth = pick("never", "1", "2", "5", "governor")
    missing = {"paired"} if depth == "never" else set()
    missing |= {"gate"} if layers == 1 else set()
    prefetches = [name for name, info in PREFETCH.items() if not missing & info.needs]
    prefetch = pick(*prefetches)
    layout = "global" if prefetch == "stream" else pick("per-layer", "global")
    demand = pick("resident", "staging")
    form = pick("plain", "coded", "coded-base")
    settings: dict[str, Any] = {
        "policy__eviction": pick(*EVICTION),
        "policy__prefetch": prefetch,
        "policy__depth": depth,
        "policy__demand": demand,
        "memory__slots": int(rng.integers(1, experts + 1)),
        "memory__layout": layout,
        "memory__staging_slots": pick(1, 3) if demand == "staging" else 0,
        "memory__initial": pick("cold", "highest", "popular"),
        "experts__form": form,
        "experts__draft_bits": pick(2, 3, 4),
        "experts__grouped": pick(True, False),
        "trace__between": pick("warm", "cold"),
        "machine__link_bandwidth": float(10 ** rng.uniform(7, 10)),
        "machine__link_latency": float(rng.uniform(0, 1e-4)),
        "machine__queue_depth": pick(1, 2, 3),
        "machine__granularity": int(rng.integers(2_000, 40_000)),
    }
    if depth == "governor":
        settings |= {"policy__depth_params__most": 4, "policy__depth_params__probe": 3}
    if prefetch == "oracle":
        settings |= {"policy__prefetch_params__recall": 0.7, "policy__prefetch_params__lead": 1}
    return setup_of(trace, **settings)


def same(one: Any, other: Any) -> bool:
    """Equal, floats within 1e-9."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE * CLOSE)
    return bool(one == other)


def check_equal(setup: Setup, what: object) -> None:
    """Both engines, entry by entry and metric by metric."""
    run = World(setup, journal=True).serve()
    theirs: list[Flat] = [flat_entry(entry) for journal in run.journals for entry in journal]
    block, requests = serve(setup, JOURNAL_ROOM)
    assert block.arrays["note_count"][0] <= JOURNAL_ROOM
    ours = list(entries_of(block))
    for place, (one, other) in enumerate(zip(theirs, ours, strict=False)):
        assert same(one, other), (what, place, one, other)
    assert len(theirs) == len(ours), what
    expected, got = run.result.row(), summarize_block(setup, block, requests).row()
    # Idle time is a difference of almost equal sums: nothing but rounding is left of it.
    idle_s = abs(float(expected.pop("idle_s")) - float(got.pop("idle_s")))
    assert idle_s <= CLOSE * float(expected["run_s"])
    assert {k: (v, got[k]) for k, v in expected.items() if not same(v, got[k])} == {}, what


@pytest.mark.parametrize("batch", range(RUNS // BATCH))
def test_random_configurations_agree_with_the_simpy_world(batch: int) -> None:
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        check_equal(random_setup(seed), seed)


@pytest.mark.parametrize("slots", [8, 24])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_agree_on_the_bundled_trace(preset: str, slots: int) -> None:
    memory = {"slots": slots, "allow_rounds": True}
    config = build({"preset": preset}, {"memory": memory, "trace": {"tokens": 64}})
    check_equal(resolve(config), preset)


def test_every_policy_has_a_number() -> None:
    assert set(EVICTION_NUMBERS) == set(EVICTION)
    assert set(PREFETCH_NUMBERS) == set(PREFETCH)
    assert set(DEPTH_NUMBERS) == set(DEPTH)


def test_profiled_depth_is_chosen_alike() -> None:
    trace = random_trace(tokens=40, layers=2)
    setup = setup_of(
        trace,
        policy__depth="profile",
        policy__depth_params__candidates="1,3",
        policy__depth_params__tokens=20,
    )
    expected, got = simulate(setup), simulate_compiled(setup)
    assert got.notes == expected.notes
    assert same(got.tpot_s, expected.tpot_s)


def test_pageable_experts_need_the_simpy_world() -> None:
    setup = setup_of(random_trace(tokens=20))
    assert why_not(setup) is None
    host = replace(setup.machine.host, pinnable_bytes=1)
    pageable = replace(setup, machine=replace(setup.machine, host=host))
    assert "pinned" in str(why_not(pageable))
    with pytest.raises(ValueError, match="pinned"):
        simulate_compiled(pageable)
