"""Search a space: all of it where that is a matter of minutes, else sampled, then polished."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from specter_sim.tune.choice import DIMENSIONS, Choice
from specter_sim.tune.scores import Progress, Scores
from specter_sim.tune.space import Space
from specter_traces.errors import UsageError

# Routes replayed over all configurations, tokens x layers x top-k: about two minutes on one core.
MOST_ROUTES = 500_000_000


class Search(StrEnum):
    """How a space is searched."""

    AUTO = "auto"
    EXHAUSTIVE = "exhaustive"
    OPTUNA = "optuna"


def chosen_search(asked: Search, space: Space) -> Search:
    """Exhaustive or sampled. Raises UsageError where Optuna is asked for and missing.

    Left to us, a space is searched whole where that is affordable, or where Optuna is missing.
    """
    installed = find_spec("optuna") is not None
    if asked is Search.OPTUNA and not installed:
        raise UsageError(
            "--search optuna needs Optuna, which is not installed: pip install 'specter[tune]', "
            "or use --search exhaustive"
        )
    if asked is not Search.AUTO:
        return asked
    affordable = space.size * routes_of(space) <= MOST_ROUTES
    return Search.EXHAUSTIVE if affordable or not installed else Search.OPTUNA


def routes_of(space: Space) -> int:
    """Routes that one configuration replays: tokens x layers x top-k."""
    shape = space.shape
    return space.base.trace.tokens * shape.moe_layers * shape.top_k


def run_search(
    search: Search,
    scores: Scores,
    trials: int,
    workers: int,
    folder: Path,
    progress: Progress = lambda done, total: None,
) -> None:
    """Score the space, or ``trials`` of it, and whatever is one choice away from the best.

    Raises KeyboardInterrupt when interrupted; what was scored is kept.
    """
    space = scores.space
    if search is Search.EXHAUSTIVE:
        scores.add(space.choices(), workers, progress, space.size)
    else:
        from specter_sim.tune.sampling import sample

        sample(scores, trials, workers, folder, progress)
    polish(scores, workers)


def polish(scores: Scores, workers: int = 1) -> None:
    """Change single choices of the best one that drafts, and of the best that does not, as long as
    that helps: a verdict on drafting compares two that were searched with equal care.
    """
    space = scores.space
    scores.add(starts_of(space))
    for drafts in (False, True):
        best = None
        while best != (best := _best(scores, drafts)) and best is not None:
            near = [other for name in DIMENSIONS for other in space.neighbours(best, name)]
            scores.add((other for other in near if other.drafts == drafts), workers)


def starts_of(space: Space) -> list[Choice]:
    """The simplest choice without a draft and with one, where there are any."""
    found: dict[bool, Choice] = {}
    for choice in space.choices():
        found.setdefault(choice.drafts, choice)
        if choice.drafts:
            break
    return list(found.values())


def _best(scores: Scores, drafts: bool) -> Choice | None:
    return next((choice for choice in scores.ranked() if choice.drafts == drafts), None)
