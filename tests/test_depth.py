"""Depth rules: fixed, profiled, and a governor that leaves what loses and takes what wins."""

from __future__ import annotations

from typing import Any

import pytest
from routes import paired_trace, random_trace, run_of, setup_of

from specter_sim.policies.depth import choose_fixed
from specter_sim.policies.governor import (
    ACCEPTANCE,
    choose_governed,
    ended_governed,
    expected_tokens,
    new_memory,
)
from specter_sim.sim import simulate
from specter_traces import Trace

MOST = 8


def test_fixed_is_fixed_as_far_as_the_text_allows() -> None:
    assert choose_fixed([4.0], 9) == 4
    assert choose_fixed([4.0], 2) == 2
    assert choose_fixed([0.0], 9) == 0


def test_expected_tokens_counts_the_targets_own() -> None:
    memory = governor()
    memory[ACCEPTANCE] = 0.5
    assert expected_tokens(memory, 0) == 1.0
    assert expected_tokens(memory, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    memory[ACCEPTANCE] = 1.0
    assert expected_tokens(memory, 5) == 6.0


def governor(draft_s: float = 0.1, verify_s: float = 1.0, probe_every: int = 32) -> list[float]:
    """A draft step of ``draft_s``, a verify pass of ``verify_s`` whatever its depth, no loads."""
    depths = range(MOST + 1)
    return new_memory(
        [draft_s * depth for depth in depths],
        [verify_s for _ in depths],
        [0.0 for _ in depths],
        load_s=0.0,
        probe_every=probe_every,
    )


def play(
    memory: list[float],
    windows: int,
    acceptance: float,
    draft_s: float = 0.1,
    verify_s: float = 1.0,
    per_token_s: float = 0.0,
) -> list[int]:
    """Windows in a world where exactly this share of proposals is kept; the depths chosen."""
    depths, owed = [], 0.0
    for _ in range(windows):
        depth = choose_governed(memory, 1000)
        accepted = 0
        while accepted < depth:
            owed += acceptance
            if owed < 1.0:
                break
            owed -= 1.0
            accepted += 1
        seconds = verify_s + per_token_s * depth
        ended_governed(memory, depth, accepted, draft_s * depth, seconds, 10, 0)
        depths.append(depth)
    return depths


def usual(depths: list[int]) -> float:
    """The median of the last windows: probes are the exception."""
    tail = sorted(depths[-40:])
    return tail[len(tail) // 2]


def test_the_governor_drafts_deep_when_drafts_are_cheap_and_good() -> None:
    assert usual(play(governor(), 100, acceptance=1.0)) == MOST


def test_the_governor_does_not_draft_when_it_loses() -> None:
    assert usual(play(governor(draft_s=2.0), 100, acceptance=0.9, draft_s=2.0)) == 0
    assert usual(play(governor(), 400, acceptance=0.05)) <= 1


def test_the_governor_leaves_a_depth_whose_windows_take_longer_than_predicted() -> None:
    """The cost model says a verify pass costs the same at every depth; here it does not."""
    depths = play(governor(), 300, acceptance=0.8, per_token_s=3.0)
    assert depths[0] > 0
    assert usual(depths) == 0


def test_the_governor_comes_back_when_drafting_pays_again() -> None:
    memory = governor(probe_every=4)
    assert usual(play(memory, 200, acceptance=0.05)) <= 1
    assert usual(play(memory, 2000, acceptance=1.0)) >= MOST // 2


def test_the_governor_probes_now_and_then() -> None:
    depths = play(governor(draft_s=2.0, probe_every=8), 160, acceptance=0.0, draft_s=2.0)
    probes = [number for number, depth in enumerate(depths) if depth > 0 and number > 8]
    assert 3 <= len(probes) <= 160 / 8
    assert all(number % 8 == 0 for number in probes)


def test_the_governor_never_exceeds_the_text() -> None:
    memory = governor()
    assert choose_governed(memory, 3) == 3
    assert choose_governed(memory, 0) == 0


# --- in the world


def crafted(acceptance: float) -> Trace:
    return random_trace(200, layers=2, experts=8, acceptance=acceptance, fidelity=1.0, locality=0.9)


@pytest.mark.parametrize("bandwidth", ["2 MB/s", "5 MB/s", "100 MB/s"])
def test_governed_depth_finds_what_fixed_depths_show(bandwidth: str) -> None:
    settings: dict[str, Any] = {"trace__tokens": 200, "machine__link_bandwidth": bandwidth}

    def tpot(acceptance: float, depth: int | str) -> float:
        return run_of(crafted(acceptance), policy__depth=depth, **settings).result.tpot_s

    good = [tpot(0.97, depth) for depth in (0, 2, 4, 8)]
    assert tpot(0.97, "governor") < 1.05 * min(good)
    poor = [tpot(0.1, depth) for depth in (0, 2, 4, 8)]
    assert poor == sorted(poor)
    # It has to try before it knows: a third more than never, far less than any real depth.
    assert tpot(0.1, "governor") < 1.4 * poor[0] < poor[1]


def test_the_governor_stays_at_zero_once_it_has_seen_drafting_lose() -> None:
    run = run_of(crafted(0.1), policy__depth="governor", trace__tokens=200)
    depths = [window.outcome.depth for window in run.served[0].windows]
    assert max(depths[:10]) > 0
    assert sum(depths[-60:]) <= 4


def test_profiling_takes_the_fastest_candidate() -> None:
    trace = crafted(0.9)
    settings: dict[str, Any] = {"memory__slots": 4, "trace__tokens": 64}
    tried = {d: run_of(trace, policy__depth=d, **settings).result.tpot_s for d in (1, 3, 6)}
    best = min(tried, key=lambda depth: tried[depth])
    setup = setup_of(
        trace,
        policy__depth="profile",
        policy__depth_params={"candidates": "1,3,6", "tokens": 64},
        **settings,
    )
    r = simulate(setup)
    assert r.tpot_s == pytest.approx(tried[best])
    assert any(f"depth {best} chosen" in note for note in r.notes)


def test_never_is_plain_decoding() -> None:
    r = run_of(paired_trace([[[0]]] * 5, [[[0]]] * 5, True, experts=2), memory__slots=2).result
    assert r.windows == r.committed_tokens == 5
    assert r.mean_depth == r.draft_s == 0 and r.tokens_per_window == 1
