"""Sample a space with Optuna; its journal in the output folder makes a rerun go on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from specter_sim.tune.choice import NEVER, Choice
from specter_sim.tune.scores import Progress, Scores
from specter_sim.tune.space import DEEPEST, Space
from specter_traces.errors import UsageError

JOURNAL = "optuna.journal"
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)


class Suggests(Protocol):
    """What a trial is asked for, whether it is running or finished."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """One of the choices."""

    def suggest_int(self, name: str, low: int, high: int) -> int:
        """A whole number between two."""


def sample(
    scores: Scores, trials: int, workers: int, folder: Path, progress: Progress, seed: int = 0
) -> None:
    """Run trials until ``trials`` are finished, earlier runs of the same study included.

    Only one process at a time may do so in a folder. Raises UsageError for a damaged journal.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(folder, f"{scores.identity} {scores.objective}", seed)
    finished = len(study.get_trials(deepcopy=False, states=_FINISHED))
    space, lock, started = scores.space, Lock(), finished

    def objective(trial: optuna.Trial) -> float:
        choice = suggested(trial, space)
        if not space.has(choice):
            raise optuna.TrialPruned
        known = scores.known(choice)
        score = scores.simulated(choice) if known is None else known
        with lock:
            return scores.keep(choice, score)

    def report(study: optuna.Study, trial: Any) -> None:
        nonlocal finished
        with lock:
            finished += 1
            progress(finished, trials)

    _reuse(study, scores)
    if started < trials:
        study.optimize(objective, trials - started, n_jobs=workers, callbacks=[report])


def open_study(folder: Path, name: str, seed: int) -> optuna.Study:
    """The study of this question in a folder, with trials that a kill left behind given up."""
    path = folder / JOURNAL
    _mend(path)
    # Whoever held it is gone: this process alone works in the folder.
    Path(f"{path}.lock").unlink(missing_ok=True)
    try:
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            sampler=optuna.samplers.TPESampler(seed=seed),
            study_name=name,
            direction="minimize",
            load_if_exists=True,
        )
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is not a journal of Optuna ({error}): move it away or give another --out"
        ) from None
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    return study


def suggested(trial: Suggests, space: Space) -> Choice:
    """The choice that a trial stands for; it may be impossible."""
    depth = NEVER
    if space.bits:
        depth = trial.suggest_categorical("depth", ("never", "fixed", "governor"))
    if depth == "fixed":
        depth = str(trial.suggest_int("fixed_depth", 1, DEEPEST))
    side = "drafting" if depth != NEVER else "plain"  # one distribution for each name
    codings = space.codings(depth != NEVER)
    coding, bits = codings[trial.suggest_categorical(f"coding_{side}", list(codings))]
    rules = {
        name: trial.suggest_categorical(f"{name}_{side}", space.rules(name, depth != NEVER))
        for name in ("eviction", "prefetch")
    }
    slots = trial.suggest_categorical("slots", space.values["slots"])
    demand = trial.suggest_categorical("demand", space.values["demand"])
    return space.plainest(
        Choice(depth, slots=slots, coding=coding, draft_bits=bits, demand=demand, **rules)
    )


def _reuse(study: optuna.Study, scores: Scores) -> None:
    """Give the scores of finished trials their choices again."""
    done: Iterable[Any] = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    scores.add({suggested(trial, scores.space): None for trial in done})


def _mend(path: Path) -> None:
    """Cut off a last line that a kill tore, or the next one would be glued to it."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
