"""Keeps the trials of a search in Optuna's journal, so that the same search goes on after it was
killed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vfl_common.errors import Code, InputError

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

INSTALL = 'pip install "vfl[studies]"'
By = Literal["tpe", "random", "grid"]
# Attributes of a trial and of the search.
ERROR, RUN, ASKED = "error", "run", "asked"
# Trials that end before any is pruned, and rounds of each before it is.
_FIRST_TRIALS, _FIRST_ROUNDS = 5, 1
# Apart from each other, so that two searches share no seed.
_APART = 1_000_003


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lets Optuna say nothing for a block. Raises InputError if it is not installed."""
    try:
        import optuna
    except ImportError:
        text = f"a search needs Optuna: {INSTALL}"
        raise InputError(Code.CONFIG_INVALID, text) from None
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def opened(
    folder: Path, asked: str, keys: Collection[str], *, lower: bool, prune: bool
) -> optuna.Study:
    """Opens the journal in a search's folder. ``asked``: a digest of what decides its trials;
    ``keys``: those with spaces. Raises InputError if the journal is of another search.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    pruner = (
        optuna.pruners.MedianPruner(n_startup_trials=_FIRST_TRIALS, n_warmup_steps=_FIRST_ROUNDS)
        if prune
        else optuna.pruners.NopPruner()
    )
    study = optuna.create_study(
        study_name="search",
        direction="minimize" if lower else "maximize",
        pruner=pruner,
        storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
        load_if_exists=True,
    )
    before = study.user_attrs.get(ASKED)
    if before not in (None, asked):
        text = "has a search of another recipe, other rows, or other arguments"
        raise InputError(Code.CONFIG_INVALID, f"{folder}: {text}; give another out")
    if before is None:
        study.set_user_attr(ASKED, asked)
    _begin_again(study, keys)
    return study


def _begin_again(study: optuna.Study, keys: Collection[str]) -> None:
    """Ends the trials of a program that was killed, and lets the next trials try their values."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        # If some are missing, the next trial chooses all of them again.
        if ERROR not in trial.user_attrs and set(trial.params) == set(keys):
            study.enqueue_trial(trial.params)


def ended(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the trials that have come to an end of their own, the failed ones with an error."""
    from optuna.trial import TrialState

    done = (TrialState.COMPLETE, TrialState.PRUNED)
    found = study.get_trials(states=(*done, TrialState.FAIL))
    return [each for each in found if each.state in done or ERROR in each.user_attrs]


def choose(study: optuna.Study, by: By, seed: int, number: int) -> None:
    """Makes what chooses the values of trial ``number`` afresh, so that a search that goes on
    chooses as an undisturbed one.
    """
    import optuna

    own = (seed * _APART + number) % 2**32
    study.sampler = (
        optuna.samplers.TPESampler(seed=own)
        if by == "tpe"
        else optuna.samplers.RandomSampler(seed=own)
    )
