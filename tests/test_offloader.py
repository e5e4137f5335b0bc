"""The offloader's calls, one rule of the boundary at a time."""

from __future__ import annotations

from routes import drain, finish, make_resident, offloader_of

from specter_sim.offload.journal import Journal
from specter_sim.offload.offloader import Offloader
from specter_sim.policies.state import (
    EVICTIONS,
    HITS,
    LATE,
    MISSES,
    PENDING,
    PREFETCH_LOADS,
    USEFUL,
    WASTED,
    new_state,
)
from specter_sim.types import DraftStep, LoadKind, WindowOutcome

E = 6  # experts a layer in every test here


def window(offloader: Offloader, depth: int = 0, position: int = 0) -> int:
    return offloader.begin_window(position, depth)


def end(offloader: Offloader) -> None:
    offloader.end_window(WindowOutcome(0, 0, 0.0, 0.0, 0, 0))


def release_all(offloader: Offloader, layer: int, experts: list[int]) -> None:
    for expert in experts:
        offloader.release(layer * E + expert)


def counts(offloader: Offloader, *places: int) -> tuple[int, ...]:
    return tuple(offloader.state.counters[place] for place in places)


def test_demand_goes_before_prefetch() -> None:
    offloader = offloader_of(new_state(2, E, 2, [4, 4]), prefetch="gate")
    window(offloader)
    offloader.demand(0, [1, 3], hints=[0, 5])
    kinds = [(load.expert, load.kind) for load in drain(offloader)]
    assert kinds == [
        (1, LoadKind.DEMAND),
        (3, LoadKind.DEMAND),
        (E + 0, LoadKind.PREFETCH),
        (E + 5, LoadKind.PREFETCH),
    ]


def test_a_demand_overtakes_a_plan_that_has_not_started() -> None:
    offloader = offloader_of(new_state(3, E, 2, [4, 4, 4]), prefetch="continuous", depth=1)
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [0, E + 1, 2 * E + 2], 1e-3))
    first = offloader.next_load()
    assert first is not None and first.expert == 0
    offloader.demand(0, [4])
    then = [load.expert for load in drain(offloader)]
    assert then == [4, E + 1, 2 * E + 2]


def test_a_plan_for_a_layer_already_reached_is_dropped() -> None:
    offloader = offloader_of(new_state(2, E, 2, [4, 4]), prefetch="continuous", depth=1)
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [0, 1, E + 1], 1e-3))
    offloader.demand(0, [2])
    assert [load.expert for load in drain(offloader)] == [2, E + 1]


def test_a_prefetch_spares_held_loading_planned_and_hot() -> None:
    hot = [0] * (2 * E)
    hot[E + 3] = 1
    offloader = offloader_of(new_state(2, E, 2, [2, 3], hot=hot), prefetch="continuous", depth=1)
    make_resident(offloader, [E + 2, E + 3, E + 4])
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [E + 0, E + 1, E + 2], 1e-3))
    loads = drain(offloader)
    assert [(load.expert, load.victim) for load in loads] == [(E + 0, E + 4)]
    offloader.demand(0, [0])
    offloader.demand(1, [1])
    assert {load.victim for load in drain(offloader)} <= {-1, E + 2, E + 3}


def test_hits_pending_hits_and_misses() -> None:
    offloader = offloader_of(new_state(1, E, 2, [3]), prefetch="continuous", depth=1)
    make_resident(offloader, [0])
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [1], 1e-3))
    flying = drain(offloader)
    offloader.demand(0, [0, 1, 2])
    assert counts(offloader, HITS, PENDING, MISSES) == (1, 1, 1)
    finish(offloader, flying + drain(offloader))
    release_all(offloader, 0, [0, 1, 2])
    end(offloader)
    assert counts(offloader, USEFUL, LATE, WASTED) == (0, 1, 0)


def test_a_prefetch_is_useful_once_late_or_wasted() -> None:
    offloader = offloader_of(new_state(1, E, 2, [4]), prefetch="continuous", depth=1)
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [1, 2], 1e-3))
    finish(offloader, drain(offloader))
    offloader.demand(0, [1])
    release_all(offloader, 0, [1])
    end(offloader)
    assert counts(offloader, PREFETCH_LOADS, USEFUL, LATE, WASTED) == (2, 1, 0, 1)
    window(offloader, 1, position=1)
    offloader.demand(0, [1, 2])  # both by then ordinary residents
    release_all(offloader, 0, [1, 2])
    end(offloader)
    assert counts(offloader, PREFETCH_LOADS, USEFUL, LATE, WASTED) == (2, 1, 0, 1)


def test_a_prefetch_still_flying_when_its_window_ends_was_wasted() -> None:
    offloader = offloader_of(new_state(1, E, 2, [4]), prefetch="continuous", depth=1)
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [1], 1e-3))
    flying = drain(offloader)
    offloader.demand(0, [0])
    finish(offloader, drain(offloader))
    release_all(offloader, 0, [0])
    end(offloader)
    window(offloader, 1, position=1)
    offloader.demand(0, [1])
    assert counts(offloader, PENDING, LATE, WASTED) == (1, 0, 1)
    finish(offloader, flying)
    release_all(offloader, 0, [1])


def test_more_prefetches_in_a_window_than_there_are_experts() -> None:
    """A plan that changes its mind loads, evicts and loads again; all of it is accounted for."""
    offloader = offloader_of(new_state(2, 3, 1, [2, 2]), prefetch="paper", depth=40)
    window(offloader, 40)
    for step in range(1, 41):
        # The two most predicted of 5, 4, 3 change at every step; layer 0 never fills its plan.
        offloader.drafted(DraftStep(step, [0, 5 - (step - 1) % 3], 1e-3))
        finish(offloader, drain(offloader), 1e-6)
    end(offloader)
    loads, useful, late, wasted = counts(offloader, PREFETCH_LOADS, USEFUL, LATE, WASTED)
    assert loads > 6 and (useful, late, wasted) == (0, 0, loads)
    assert not any(offloader.state.fresh)


def test_staging_leaves_residents_alone() -> None:
    offloader = offloader_of(new_state(1, E, 2, [2], staging_slots=2))
    make_resident(offloader, [0, 1])
    window(offloader)
    offloader.demand(0, [2, 3, 4])
    loads = drain(offloader)
    assert [(load.expert, load.slot, load.victim) for load in loads] == [(2, 2, -1), (3, 3, -1)]
    finish(offloader, loads)
    offloader.release(2)
    assert not offloader.is_resident(2)
    again = drain(offloader)
    assert [(load.expert, load.slot) for load in again] == [(4, 2)]
    assert offloader.is_resident(0) and offloader.is_resident(1)
    assert counts(offloader, EVICTIONS) == (0,)


def test_staging_fills_free_slots_first() -> None:
    offloader = offloader_of(new_state(1, E, 2, [2], staging_slots=2))
    window(offloader)
    offloader.demand(0, [2])
    assert [load.slot for load in drain(offloader)] == [0]


def test_a_request_forgets_estimates_and_keeps_residents() -> None:
    offloader = offloader_of(new_state(1, E, 2, [2]), prefetch="paper", depth=1)
    window(offloader, 1)
    offloader.drafted(DraftStep(1, [3], 0.5))
    finish(offloader, drain(offloader), 0.25)
    learnt = list(offloader._prefetch_memory)
    assert learnt[1] != offloader.rules.prefetch_memory[1]
    offloader.begin_request()
    assert tuple(offloader._prefetch_memory) == offloader.rules.prefetch_memory
    assert offloader.is_resident(3)


def test_an_empty_pass_over_known_tokens_drafts_nothing() -> None:
    offloader = offloader_of(new_state(1, E, 2, [2]), depth=4)
    offloader.begin_pass(0, 5)
    offloader.demand(0, [0, 1, 2, 3])
    waiting, loads = [0, 1, 2, 3], 0
    while waiting:
        started = drain(offloader)
        loads += len(started)
        finish(offloader, started)
        for index in [i for i in waiting if offloader.is_resident(i)]:
            waiting.remove(index)
            offloader.release(index)
    offloader.end_pass()
    assert loads == 4


def test_depth_is_limited_by_the_text() -> None:
    offloader = offloader_of(new_state(1, E, 2, [2]), depth=4)
    assert offloader.begin_window(0, 9) == 4
    assert offloader.begin_window(4, 3) == 3
    assert offloader.begin_window(7, 0) == 0


def test_every_call_is_in_the_journal_with_its_answer() -> None:
    journal = Journal()
    offloader = offloader_of(new_state(1, E, 2, [2]), journal=journal)
    window(offloader)
    offloader.demand(0, [0])
    load = offloader.next_load()
    assert load is not None
    finish(offloader, [load])
    assert offloader.next_load() is None
    assert offloader.must_join() is False
    offloader.release(0)
    end(offloader)
    assert [entry.call for entry in journal] == [
        "begin_request",
        "begin_window",
        "demand",
        "next_load",
        "copied",
        "next_load",
        "must_join",
        "release",
        "end_window",
    ]
    assert [entry.answer for entry in journal][1:4] == [0, None, load]
