"""Stores the trials of a search in Optuna's journal, so that a killed search can be resumed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vfl.searching.claims import Writing
from vfl.searching.spaces import Space
from vfl_common.errors import Code, InputError
from vfl_common.files import write_error

if TYPE_CHECKING:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial

INSTALL = "pip install '.[studies]' in the clone of vfl"
By = Literal["tpe", "random", "grid"]
# Attributes of a trial: why it failed, the folder of its run, its place among all trials, and the
# driver that makes it. ASKED is an attribute of the search: the digest of its arguments.
ERROR, RUN, PLACE, DRIVER, ASKED = "error", "run", "place", "driver", "asked"
_NOTED: dict[str, type] = {ERROR: str, RUN: str, PLACE: int, DRIVER: str}
JOURNAL = "journal.log"
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
# The number of trials that end before any is pruned, and of rounds of a trial before it is.
_FIRST_TRIALS, _FIRST_ROUNDS = 5, 1
# The distance of the seeds of two searches, so that they share none.
_APART = 1_000_003


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Optuna for a block. Raises InputError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise InputError(
            Code.CONFIG_INVALID, f"Optuna is not installed. Install it: {INSTALL}."
        ) from None
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def open_study(
    folder: Path, asked: str, spaces: Mapping[str, Space], *, lower: bool, prune: bool
) -> optuna.Study:
    """Opens the journal in a search's folder.

    ``asked``: a digest of what decides its trials; ``spaces``: the possible values. Raises
    InputError if the journal is of another search, damaged, or cannot be written.
    """
    import optuna
    from optuna.storages import JournalStorage

    pruner = (
        optuna.pruners.MedianPruner(n_startup_trials=_FIRST_TRIALS, n_warmup_steps=_FIRST_ROUNDS)
        if prune
        else optuna.pruners.NopPruner()
    )
    path = folder / JOURNAL
    directions = optuna.study.StudyDirection
    direction = directions.MINIMIZE if lower else directions.MAXIMIZE
    try:
        study = optuna.create_study(
            study_name="search",
            direction=direction,
            pruner=pruner,
            storage=JournalStorage(_lines_of(path)),
            load_if_exists=True,
        )
        before = study.user_attrs.get(ASKED)
        whole = before != asked or (
            study.direction == direction
            and all(_is_whole(trial, spaces) for trial in study.get_trials(deepcopy=False))
        )
    # Optuna raises these for lines that it has not written.
    except _DAMAGED:
        whole, before = False, asked
    if before not in (None, asked):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{folder}: has a search of another recipe, other rows, or other arguments. Give "
            "another out.",
        )
    if not whole:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: lacks a line, or has one that no search has written. Restore it, or give "
            "another out.",
        )
    if before is None:
        study.set_user_attr(ASKED, asked)
    return study


def _is_whole(trial: FrozenTrial, spaces: Mapping[str, Space]) -> bool:
    """Returns whether a trial has all attributes of its state. Raises one of ``_DAMAGED`` if a
    value has another type.
    """
    from optuna.trial import TrialState

    noted, state = trial.user_attrs, trial.state
    if any(type(noted.get(key, kind())) is not kind for key, kind in _NOTED.items()):
        return False
    if not all(spaces[key].has(value) for key, value in trial.params.items()):
        return False
    # A value that is not a number raises TypeError.
    _ = [math.isnan(value) for value in trial.intermediate_values.values()]
    # Its driver works, or was killed.
    if state == TrialState.RUNNING or (state == TrialState.FAIL and ERROR not in noted):
        return True
    if state == TrialState.WAITING:
        return PLACE in noted
    whole = PLACE in noted and trial.params.keys() == spaces.keys()
    if state == TrialState.COMPLETE:
        whole = whole and RUN in noted and math.isfinite(trial.values[0])
    return whole


def _lines_of(path: Path) -> JournalFileBackend:
    """Returns the lines of a journal. Adding one raises InputError if the disk is full."""
    from optuna.storages.journal import JournalFileBackend

    class Lines(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            try:
                super().append_logs(logs)
            except OSError as error:
                raise write_error(path, error) from None

    return Lines(str(path), cast("Any", Writing(path)))


def get_ended_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the trials that have ended (failed ones only with an error), in the order of their
    places.
    """
    from optuna.trial import TrialState

    done = (TrialState.COMPLETE, TrialState.PRUNED)
    trials = study.get_trials(deepcopy=False, states=(*done, TrialState.FAIL))
    own = [trial for trial in trials if trial.state in done or ERROR in trial.user_attrs]
    return sorted(own, key=lambda trial: trial.user_attrs[PLACE])


def running(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the trials that a driver makes, or made until it was killed."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def begin_again(study: optuna.Study, trial: FrozenTrial, keys: Collection[str]) -> None:
    """Ends the trial of a killed driver, and queues its values for the next one. ``keys``: those
    with spaces.
    """
    from optuna.trial import TrialState

    study.tell(trial.number, state=TrialState.FAIL)
    # If some values are missing, all are chosen again, for the same place.
    if set(trial.params) == set(keys) and PLACE in trial.user_attrs:
        study.enqueue_trial(trial.params, user_attrs={PLACE: trial.user_attrs[PLACE]})


def next_place(study: optuna.Study, every: int) -> int | None:
    """Returns the place of the next trial, of ``every``: one that is repeated, else the first free
    one; None if all are taken.
    """
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return int(trial.user_attrs[PLACE])
    taken = {trial.user_attrs.get(PLACE) for trial in [*get_ended_trials(study), *running(study)]}
    return next((place for place in range(every) if place not in taken), None)


def ask(
    study: optuna.Study, by: By, seed: int, place: int, driver: str, point: dict[str, Any] | None
) -> optuna.Trial:
    """Begins the trial of a place. ``point``: its values in a grid.

    Each trial has a new sampler, seeded by the search's seed and the place, so a resumed search
    chooses as an undisturbed one.
    """
    import optuna
    from optuna.trial import TrialState

    own = (seed * _APART + place) % 2**32
    study.sampler = (
        optuna.samplers.TPESampler(seed=own)
        if by == "tpe"
        else optuna.samplers.RandomSampler(seed=own)
    )
    if point is not None and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.enqueue_trial(point, user_attrs={PLACE: place})
    trial = study.ask()
    trial.set_user_attr(PLACE, place)
    trial.set_user_attr(DRIVER, driver)
    return trial
