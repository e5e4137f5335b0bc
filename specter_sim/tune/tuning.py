"""Tune: search the tuning half, then say what the winner comes to where nothing was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from specter_sim.config import RunConfig
from specter_sim.presets import PRESETS
from specter_sim.results import Result
from specter_sim.tune.choice import BASELINE, DIMENSIONS, NEVER, Choice, choice_of, settled
from specter_sim.tune.scores import Objective, Scores, measure
from specter_sim.tune.space import Space, halves_of
from specter_traces.errors import SpecterError, UsageError

FINALISTS = 20
GIVEN = "as configured"


@dataclass(frozen=True)
class Standing:
    """One system, measured on both halves.

    ``choice`` is what it chooses; a preset may differ from others in more than that.
    """

    name: str
    choice: Choice
    config: RunConfig
    tuning: Result
    held_out: Result


@dataclass(frozen=True)
class Worth:
    """What one choice of the winner is worth.

    Attributes:
        value: what the winner chose; ``usual`` what the baseline has there.
        without: the winner with this choice set back, and with what hangs on it; None with the
            ``reason`` where that is impossible, or where the winner has the baseline's choice.
        alone: the baseline with this choice made.
        next_best: the best other value and its objective on the tuning half, all else equal.
    """

    dimension: str
    value: str
    usual: str
    without: Standing | None
    alone: Standing | None
    reason: str
    next_best: tuple[str, float] | None


@dataclass(frozen=True)
class Tuning:
    """Everything that tuning found out.

    Attributes:
        whole: the winner on all sequences.
        finalists: the best distinct schedules of the tuning half, the winner first.
        systems: the presets (and the configuration as given) that run here, the fastest first on
            the held-out half; ``missing`` says why the others do not.
        drafting, plain: the best choice that drafts and the best that does not, on the tuning half.
        equal: other choices whose schedule is the winner's.
    """

    objective: Objective
    winner: Standing
    whole: Result
    finalists: tuple[Standing, ...]
    systems: tuple[Standing, ...]
    missing: dict[str, str]
    worth: tuple[Worth, ...]
    drafting: Standing | None
    plain: Standing | None
    equal: int

    @property
    def runner_up(self) -> Standing | None:
        """The second best schedule of the tuning half."""
        return self.finalists[1] if len(self.finalists) > 1 else None

    @property
    def held_out_rank(self) -> int:
        """The winner's place among the finalists on the held-out half, 1 for the first."""
        mine = self.objective.of(self.winner.held_out)
        return 1 + sum(self.objective.of(s.held_out) < mine for s in self.finalists)

    @property
    def better_systems(self) -> tuple[Standing, ...]:
        """Systems that beat the winner on the held-out half."""
        mine = self.objective.of(self.winner.held_out)
        return tuple(s for s in self.systems if self.objective.of(s.held_out) < mine)


def conclude(scores: Scores, given: RunConfig) -> Tuning:
    """What a finished search means; ``given`` is the configuration before tuning.

    The winner is the best of the search and of every complete system that fits: it is never worse
    on the tuning half than any of them.
    """
    space, objective = scores.space, scores.objective
    systems, missing = _systems(space, given)
    best = [_chosen(space, choice) for choice in scores.distinct(FINALISTS)]
    ranked = sorted([*best, *systems], key=lambda s: objective.of(s.tuning))
    winner, finalists = ranked[0], _distinct(ranked)[:FINALISTS]
    return Tuning(
        objective,
        winner,
        measure(winner.config),
        tuple(finalists),
        tuple(sorted(systems, key=lambda s: objective.of(s.held_out))),
        missing,
        tuple(_worths(scores, winner)),
        _first(scores, lambda choice: choice.drafts),
        _first(scores, lambda choice: not choice.drafts),
        scores.equals(winner.choice) if scores.known(winner.choice) else 0,
    )


def stand(name: str, choice: Choice, config: RunConfig) -> Standing:
    """Measure a system on both halves. Raises SpecterError when it cannot run."""
    tuning, held_out = halves_of(config)
    return Standing(name, choice, config, measure(tuning), measure(held_out))


def _chosen(space: Space, choice: Choice) -> Standing:
    return stand(choice.label, choice, space.config(choice))


def _systems(space: Space, given: RunConfig) -> tuple[list[Standing], dict[str, str]]:
    """The presets, and what the user had, within the budget."""
    builders: dict[str, Callable[[], RunConfig]] = {
        name: partial(space.system, name) for name in PRESETS
    }
    if choice_of(given) != BASELINE:
        builders[GIVEN] = partial(space.config, choice_of(given), given)
    found, missing = [], {}
    for name, build in builders.items():
        try:
            config = build()
            found.append(stand(name, choice_of(config), config))
        except SpecterError as error:
            missing[name] = str(error)
    return found, missing


def _distinct(ranked: Iterable[Standing]) -> list[Standing]:
    """One standing of each schedule, in order."""
    found: dict[tuple[float, float], Standing] = {}
    for standing in ranked:
        key = standing.tuning.tpot_s, standing.tuning.tpot_p99_s
        found.setdefault(key, standing)
    return list(found.values())


def _first(scores: Scores, wanted: Callable[[Choice], bool]) -> Standing | None:
    choice = next((choice for choice in scores.ranked() if wanted(choice)), None)
    return None if choice is None else _chosen(scores.space, choice)


def _worths(scores: Scores, winner: Standing) -> Iterable[Worth]:
    space = scores.space
    for dimension in DIMENSIONS:
        value, usual = getattr(winner.choice, dimension), getattr(BASELINE, dimension)
        if dimension == "draft_bits" and value is None:
            continue
        without = alone = None
        reason = "as in the baseline"
        if value != usual:
            without, alone, reason = _ablated(space, winner, dimension)
        next_best = _next_best(scores, winner.choice, dimension)
        yield Worth(dimension, str(value), str(usual), without, alone, reason, next_best)


def _ablated(
    space: Space, winner: Standing, dimension: str
) -> tuple[Standing | None, Standing | None, str]:
    """The winner without one choice, the baseline with it alone, and why one of them is not."""
    if dimension == "draft_bits":
        return None, None, "nothing to set it back to"
    without, reason = _tried(space, removed(winner.choice, dimension), winner.config)
    alone, reason_alone = _tried(space, added(winner.choice, dimension), None)
    return without, alone, reason or reason_alone


def removed(choice: Choice, dimension: str) -> Choice:
    """A choice with one dimension as in the baseline, and what hangs on it repaired.

    Without a draft, what follows it goes too, and a base's memory is better spent on slots.
    """
    other = replace(choice, **{dimension: getattr(BASELINE, dimension)})
    if dimension == "depth" and choice.coding == "coded-base":
        other = replace(other, coding="coded")
    return settled(other, choice.draft_bits)


def added(choice: Choice, dimension: str) -> Choice | None:
    """The baseline with one dimension of a choice; None where that needs a draft."""
    other = replace(BASELINE, **{dimension: getattr(choice, dimension)})
    made = settled(other, choice.draft_bits)
    return made if getattr(made, dimension) == getattr(choice, dimension) else None


def _tried(
    space: Space, choice: Choice | None, system: RunConfig | None
) -> tuple[Standing | None, str]:
    if choice is None:
        return None, "needs a draft"
    try:
        return stand(choice.label, choice, space.config(choice, system)), ""
    except UsageError as error:
        return None, "does not fit" if "does not fit" in str(error) else str(error)


def _next_best(scores: Scores, choice: Choice, dimension: str) -> tuple[str, float] | None:
    """The best other value of one dimension, on the tuning half."""
    if not scores.space.has(choice):
        return None
    near = scores.space.neighbours(choice, dimension)
    scores.add(near)
    if not near:
        return None
    other = min(near, key=scores.value)
    value = str(getattr(other, dimension))
    return (NEVER if dimension == "depth" and not other.drafts else value), scores.value(other)
