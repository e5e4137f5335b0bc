"""Tuning: what may be chosen, where the slots go, and what is said about the winner."""

from __future__ import annotations

import random
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_traces import toy_trace

from specter_sim.config import RunConfig, build, to_toml
from specter_sim.engine.run import simulate_compiled
from specter_sim.policies import EVICTION, PREFETCH
from specter_sim.presets import PRESETS
from specter_sim.setup import resolve
from specter_sim.sim import simulate
from specter_sim.sweep.store import Store
from specter_sim.tune.allocation import allocate, saved_loads
from specter_sim.tune.choice import BASELINE, Choice, choice_of, settled
from specter_sim.tune.scores import Objective, Scores, measure
from specter_sim.tune.search import Search, run_search
from specter_sim.tune.space import Room, Space, halves_of
from specter_sim.tune.tuning import Tuning, added, conclude, removed
from specter_traces import Trace, bundled, save
from specter_traces.errors import UsageError

MB = 1_000_000


class Memory:
    """Scores kept for as long as the test lasts."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}

    def result(self, key: str) -> dict[str, Any] | None:
        return self.records.get(key)

    def append(self, record: dict[str, Any]) -> None:
        assert record["key"] not in self.records, "scored twice"
        self.records[record["key"]] = record


def config(*layers: dict[str, Any]) -> RunConfig:
    return build({"trace": {"tokens": 128}}, *layers)


def unpaired(folder: Path) -> str:
    """A trace without a draft, of the bundled routes."""
    whole = bundled("tiny-moe-base4").select(range(6))
    kept = ("sequence_offsets", "prompt_lengths", "target_ids", "target_weights", "gate_ids")
    header = replace(whole.header, draft=None)
    path = folder / "unpaired.safetensors"
    save(Trace(header=header, **{name: getattr(whole, name) for name in kept}), path)
    return str(path)


@pytest.fixture(scope="module")
def plain_space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    trace = {"trace": {"path": unpaired(tmp_path_factory.mktemp("trace"))}}
    return Space(config(trace), 20 * MB)


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(config(), 24 * MB)


# What was added to the configuration


def test_the_two_parts_share_no_sequence_and_leave_none_out() -> None:
    whole = config({"trace": {"tokens": 10**6}})
    parts = [[s.name for s in resolve(half).trace.header.sequences] for half in halves_of(whole)]
    every = [s.name for s in resolve(whole).trace.header.sequences]
    assert not set(parts[0]) & set(parts[1])
    assert parts[0] == every[0::2] and parts[1] == every[1::2]


def test_a_part_of_one_sequence_is_refused() -> None:
    with pytest.raises(UsageError, match=r'part = "odd" is every second sequence, and there are 1'):
        resolve(config({"trace": {"part": "odd", "sequences": 1}}))


def test_equal_slots_in_every_layer_are_slots() -> None:
    policy = {"policy": {"eviction": "hot-lru", "depth": 4, "prefetch": "continuous"}}
    one = simulate(resolve(config(policy, {"memory": {"slots": 11}})))
    each = simulate(resolve(config(policy, {"memory": {"slots_per_layer": [11] * 8}})))
    assert one == each


def test_layers_of_their_own_size_run_alike_on_both_engines() -> None:
    slots = [6, 48, 9, 7, 20, 6, 13, 8]
    for policy in ({"eviction": "hot-lru"}, {"depth": 4, "prefetch": "continuous"}):
        setup = resolve(config({"memory": {"slots_per_layer": slots}, "policy": policy}))
        assert setup.slots == tuple(slots) and setup.plan.slots == sum(slots)
        ours, reference = simulate_compiled(setup), simulate(setup)
        assert ours.tpot_s == pytest.approx(reference.tpot_s, rel=1e-9)
        assert (ours.hits, ours.loads) == (reference.hits, reference.loads)


def test_a_hot_set_takes_its_share_of_each_layers_own_slots() -> None:
    slots = [6, 48, 9, 7, 20, 6, 13, 8]
    memory, policy = {"slots_per_layer": slots}, {"eviction": "hot-lru"}
    hot = resolve(config({"memory": memory, "policy": policy})).hot
    assert hot.reshape(8, 48).sum(axis=1).tolist() == [count // 2 for count in slots]


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({"slots_per_layer": [8] * 7}, "8 MoE layers of 48 experts, got 7"),
        ({"slots_per_layer": [8] * 7 + [49]}, "the highest 49"),
        ({"slots_per_layer": []}, "got 0"),
        ({"slots_per_layer": [8] * 7 + [5]}, "needs 6 slots a layer for one token, got 5"),
        ({"slots_per_layer": [8] * 7 + [0]}, "greater than or equal to 1"),
        ({"slots_per_layer": [8] * 8, "slots": 8}, "slots and slots_per_layer are both given"),
        ({"slots_per_layer": [8] * 8, "budget": 8}, "slots_per_layer and budget are both given"),
        ({"slots_per_layer": [8] * 8, "layout": "global"}, 'layout is "global"'),
    ],
)
def test_impossible_slots_of_layers_are_one_line(memory: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(config({"memory": memory}))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_slots_of_layers_survive_a_file_and_give_way_to_a_later_limit() -> None:
    uneven = config({"memory": {"slots_per_layer": [6, 7, 8, 9, 10, 11, 12, 13]}})
    assert build(tomllib.loads(to_toml(uneven))) == uneven
    later = build(tomllib.loads(to_toml(uneven)), {"memory": {"budget": "24 MB"}})
    assert later.memory.slots_per_layer is None


# Where the slots go


def test_slots_go_where_the_next_one_saves_most() -> None:
    saved = np.array([[0, 9, 1, 1, 0], [0, 5, 4, 3, 0]])
    assert allocate(saved, 2, 1) == (1, 1)
    assert allocate(saved, 3, 1) == (2, 1)
    assert allocate(saved, 5, 1) == (2, 3)
    assert allocate(saved, 9, 1) == (4, 4), "never more than there are experts"
    assert allocate(saved, 1, 1) is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=1, max_size=3),
    st.integers(1, 15),
)
def test_greedy_slots_are_the_best_where_gains_fall(gains: list[list[int]], total: int) -> None:
    saved = np.array([[*sorted(row, reverse=True), 0] for row in gains])
    found = allocate(saved, total, 1)
    if found is None:
        assert total < len(saved)
        return

    def worth(slots: tuple[int, ...]) -> int:
        return sum(int(saved[layer, 1:count].sum()) for layer, count in enumerate(slots))

    every = product(range(1, 5), repeat=len(saved))
    assert sum(found) == min(total, 4 * len(saved))
    assert worth(found) == max(worth(slots) for slots in every if sum(slots) == sum(found))


def test_saved_loads_are_those_of_a_plain_lru() -> None:
    trace = toy_trace(2, 9, 3, (60,))
    saved = saved_loads(trace, warm=True)

    def hits(layer: int, slots: int) -> int:
        recent: list[int] = []
        found = 0
        for row in np.sort(trace.target_ids[:, layer], axis=1).tolist():
            found += sum(expert in recent[-slots:] for expert in row)
            recent = [expert for expert in recent if expert not in row] + row
        return found

    for layer, slots in product(range(2), range(3, 9)):
        assert saved[layer, slots] == hits(layer, slots + 1) - hits(layer, slots)


# What may be chosen


def test_every_choice_fits_runs_and_is_no_bound(space: Space) -> None:
    choices = list(space.choices())
    assert len(choices) == space.size == len(set(choices))
    for choice in random.Random(1).sample(choices, 60):
        setup = resolve(space.config(choice))
        assert setup.plan.total_bytes <= space.budget_bytes
        assert choice_of(setup.config) == choice
        rules = EVICTION[choice.eviction], PREFETCH[choice.prefetch]
        assert not any("future" in rule.needs for rule in rules)
    assert {choice.depth for choice in choices} == {
        "never",
        "governor",
        *map(str, range(1, 17)),
    }


def test_a_draft_of_each_size_has_its_own_recorded_routes(space: Space) -> None:
    for bits in space.bits:
        choice = Choice("4", coding="coded-base", draft_bits=bits)
        draft = resolve(space.config(choice)).trace.header.draft
        assert draft is not None and draft.bits == bits
    assert space.bits == (2, 3, 4)
    assert any("8 bits" in note for note in space.notes)


def test_slots_by_marginal_benefit_spend_the_same_memory(space: Space) -> None:
    uniform = Choice("4", coding="coded-base", draft_bits=3)
    uneven = resolve(space.config(replace(uniform, slots="marginal")))
    even = resolve(space.config(uniform))
    assert len(set(uneven.slots)) > 1
    assert even.plan.slots <= uneven.plan.slots < even.plan.slots + 8
    assert uneven.plan.total_bytes <= space.budget_bytes


def test_with_less_than_a_tokens_experts_a_layer_slots_stay_even() -> None:
    narrow = Space(config(), 14 * MB)
    few = narrow.shape.top_k * narrow.shape.moe_layers
    tight = {c for c in narrow.choices() if isinstance(r := narrow.room(c), Room) and r.total < few}
    assert {choice.slots for choice in tight} == {"uniform", "shared"}
    uniform = next(choice for choice in tight if choice.slots == "uniform")
    assert max(resolve(narrow.config(uniform)).slots) < narrow.shape.top_k


def test_without_a_draft_only_plain_decoding_is_searched(plain_space: Space) -> None:
    choices = list(plain_space.choices())
    assert choices and not any(choice.drafts for choice in choices)
    assert "predicted" not in {choice.eviction for choice in choices}
    assert any("only choices without one were searched" in note for note in plain_space.notes)


def test_where_everything_fits_eviction_is_no_choice(plain_space: Space) -> None:
    roomy = Space(plain_space.base, 10**9)
    assert {(c.eviction, c.slots, c.demand) for c in roomy.choices()} == {
        ("lru", "uniform", "resident")
    }


def test_a_budget_too_small_names_the_smallest_that_works() -> None:
    with pytest.raises(UsageError, match=r"smallest budget that works is (\d+) B") as caught:
        Space(config(), 2 * MB)
    least = int(str(caught.value).partition("works is ")[2].partition(" B")[0])
    assert list(Space(config(), least).choices())
    with pytest.raises(UsageError, match="smallest budget"):
        Space(config(), least - 1)


def test_one_sequence_cannot_be_halved() -> None:
    with pytest.raises(UsageError, match="needs at least 2 sequences"):
        Space(config({"trace": {"sequences": 1}}), 24 * MB)
    with pytest.raises(UsageError, match=r"trace\.part"):
        Space(config({"trace": {"part": "odd"}}), 24 * MB)


def test_experts_that_cannot_be_coded_are_told_and_left_out() -> None:
    table = {"model": "gpt-oss-20b", "trace": {"path": "synth"}, "machine": {"name": "rtx-4090"}}
    mxfp4 = Space(config(table), 8 * 10**9)
    assert {choice.coding for choice in mxfp4.choices()} == {"plain"}
    assert any("coding is for BF16" in note for note in mxfp4.notes)


def test_choices_that_need_a_draft_go_with_it() -> None:
    winner = Choice("4", "predicted", "continuous", coding="coded-base", draft_bits=3)
    assert removed(winner, "depth") == Choice(coding="coded")
    assert removed(winner, "coding") == replace(winner, coding="plain")
    assert added(winner, "prefetch") is None
    assert added(winner, "depth") == Choice("4", draft_bits=3)
    assert settled(Choice(draft_bits=4), 3) == BASELINE


# The search and what it says


@pytest.fixture(scope="module")
def exhaustive(plain_space: Space) -> tuple[Scores, Tuning]:
    scores = Scores(plain_space, Objective.TPOT, Memory(), "test")
    run_search(Search.EXHAUSTIVE, scores, 0, 2, Path("unused"))
    return scores, conclude(scores, plain_space.base)


def test_an_exhaustive_search_finds_the_best_of_all(
    plain_space: Space, exhaustive: tuple[Scores, Tuning]
) -> None:
    scores, found = exhaustive
    assert len(scores) == plain_space.size
    on_tuning = [halves_of(plain_space.config(choice))[0] for choice in plain_space.choices()]
    values = [measure(one).tpot_s for one in on_tuning]
    assert [scores.value(choice) for choice in plain_space.choices()] == values
    assert found.winner.tuning.tpot_s == min(values)
    assert found.drafting is None and found.plain is not None
    assert found.plain.tuning == found.winner.tuning


def test_both_numbers_are_those_of_an_ordinary_run(exhaustive: tuple[Scores, Tuning]) -> None:
    winner = exhaustive[1].winner
    tuning, held_out = (simulate(resolve(half)) for half in halves_of(winner.config))
    assert winner.tuning.tpot_s == pytest.approx(tuning.tpot_s, rel=1e-9)
    assert winner.held_out.tpot_s == pytest.approx(held_out.tpot_s, rel=1e-9)
    assert tuning.tpot_s != held_out.tpot_s


def test_what_a_choice_is_worth_is_measured(exhaustive: tuple[Scores, Tuning]) -> None:
    scores, found = exhaustive
    assert found.winner.choice.coding == "coded"
    coding = next(one for one in found.worth if one.dimension == "coding")
    assert coding.without is not None and coding.alone is not None
    plain = replace(found.winner.choice, coding="plain")
    assert coding.without.tuning.tpot_s == scores.value(plain) > found.winner.tuning.tpot_s
    assert coding.alone.tuning.tpot_s == scores.value(Choice(coding="coded"))
    assert coding.next_best is not None and coding.next_best[1] >= found.winner.tuning.tpot_s


@pytest.mark.parametrize("objective", Objective)
def test_the_winner_is_never_worse_than_a_preset_on_the_tuning_half(
    space: Space, objective: Objective
) -> None:
    scores = Scores(space, objective, Memory(), "test")
    scores.add([BASELINE])  # nothing was searched: the presets alone decide
    found = conclude(scores, space.base)
    assert set(PRESETS) == {one.name for one in found.systems} | set(found.missing)
    least = min(objective.of(one.tuning) for one in found.systems)
    assert objective.of(found.winner.tuning) == least
    for name in PRESETS:
        memory = {"budget": space.budget_bytes, "allow_rounds": True}
        half = config({"preset": name}, {"memory": memory, "trace": {"part": "even"}})
        assert objective.of(found.winner.tuning) <= objective.of(measure(half)) * (1 + 1e-12)


def test_a_preset_that_is_better_on_held_out_text_is_told(
    exhaustive: tuple[Scores, Tuning],
) -> None:
    _, found = exhaustive
    assert not found.better_systems
    slow = replace(found.winner.held_out, tpot_s=1.0)
    unlucky = replace(found, winner=replace(found.winner, held_out=slow))
    assert {one.name for one in unlucky.better_systems} == {one.name for one in found.systems}
    assert unlucky.held_out_rank == len(found.finalists) + 1 - (
        sum(one.held_out.tpot_s >= 1.0 for one in found.finalists)
    )


def test_the_configuration_as_given_competes_too(space: Space) -> None:
    policy = {"eviction": "fifo", "prefetch": "gate"}
    given = config({"policy": policy, "experts": {"form": "coded"}})
    scores = Scores(Space(given, space.budget_bytes), Objective.TPOT, Memory(), "test")
    scores.add([BASELINE])
    names = [one.name for one in conclude(scores, given).systems]
    assert "as configured" in names


def test_scores_are_kept_and_not_computed_again(plain_space: Space, tmp_path: Path) -> None:
    some = list(plain_space.choices())[:20]
    with Store(tmp_path) as store:
        first = Scores(plain_space, Objective.TPOT, store, "one")
        first.add(some, workers=2)
        values = [first.value(choice) for choice in some]
    with Store(tmp_path) as store:
        again = Scores(plain_space, Objective.TPOT, store, "one")
        again.add(some)
        assert [again.value(choice) for choice in some] == values and again.reused == 20
        other = Scores(plain_space, Objective.TPOT, store, "another")
        other.add(some[:2])
        assert other.reused == 0


# Optuna


@pytest.fixture
def sampled(space: Space, tmp_path: Path) -> Iterator[tuple[Scores, Path]]:
    pytest.importorskip("optuna", reason="needs the extra tune")
    with Store(tmp_path / "trials") as store:
        yield Scores(space, Objective.TPOT, store, "test"), tmp_path


def test_sampling_goes_on_where_it_stopped(sampled: tuple[Scores, Path]) -> None:
    from specter_sim.tune.sampling import JOURNAL, open_study, sample

    scores, folder = sampled
    sample(scores, 12, 1, folder, lambda done, total: None)
    with (folder / JOURNAL).open("ab") as file:
        file.write(b'{"op_code": 4, "wor')  # killed in the middle of a line
    (folder / f"{JOURNAL}.lock").touch()  # and while it held the lock
    started = time.monotonic()
    study = open_study(folder, "test tpot", 0)
    assert time.monotonic() - started < 20, "Optuna waits half a minute for a lock to be let go"
    study.ask()  # and with a trial that nobody will finish
    seen: list[int] = []
    before = len(scores)
    sample(scores, 20, 2, folder, lambda done, total: seen.append(done))
    assert sorted(seen) == list(range(13, 21))
    assert len(scores) >= before
    states = [trial.state.name for trial in open_study(folder, "test tpot", 0).trials]
    assert states.count("COMPLETE") + states.count("PRUNED") == 20
    assert states.count("FAIL") == 1 and "RUNNING" not in states


def test_sampled_choices_are_polished(sampled: tuple[Scores, Path]) -> None:
    scores, folder = sampled
    space = scores.space
    run_search(Search.OPTUNA, scores, 10, 2, folder)
    for drafts in (False, True):
        best = next(choice for choice in scores.ranked() if choice.drafts == drafts)
        near = [
            other
            for name in ("depth", "eviction", "coding", "slots")
            for other in space.neighbours(best, name)
            if other.drafts == drafts
        ]
        assert near and all(scores.known(other) is not None for other in near)
        assert all(scores.value(other) >= scores.value(best) for other in near)
