"""Stores the trials of a search in Optuna's journal, from which a killed search is resumed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vfl_common.errors import Code, InputError
from vfl_common.files import write_error
from vfl_lab.searching.claims import JournalLock
from vfl_lab.searching.spaces import Space

if TYPE_CHECKING:
    import optuna
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial

INSTALL = "pip install '.[studies]' in the clone of vfl"
By = Literal["tpe", "random", "grid"]
# The names of a trial's attributes: error message, folder of the run, index among all trials, and
# driver. DIGEST names an attribute of the search: the digest of its arguments.
ERROR, RUN, PLACE, DRIVER, DIGEST = "error", "run", "place", "driver", "asked"
_ATTRIBUTE_TYPES: dict[str, type] = {ERROR: str, RUN: str, PLACE: int, DRIVER: str}
JOURNAL = "journal.log"
# The exceptions that Optuna raises for a damaged journal.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError)
# The number of trials that must end before a trial is pruned, and the number of rounds of a trial
# before it can be pruned.
_UNPRUNED_TRIALS, _UNPRUNED_ROUNDS = 5, 1
# A factor for the search's seed, so that the trials of two searches have different seeds.
_SEED_FACTOR = 1_000_003


@contextlib.contextmanager
def silence_optuna() -> Iterator[None]:
    """Limits Optuna's log to errors for a block. Raises InputError if Optuna is not installed."""
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
    folder: Path, digest: str, spaces: Mapping[str, Space], *, lower: bool, prune: bool
) -> optuna.Study:
    """Opens the journal in the folder of a search, and creates it if it does not exist.

    Args:
        folder: The folder of the search.
        digest: A digest of the recipe, the rows and the arguments, which determine the trials.
        spaces: {key of the recipe: possible values}.
        lower: Whether lower values of the objective are better.
        prune: Whether to prune trials.

    Raises InputError if the journal belongs to another search, is damaged, or cannot be written.
    """
    import optuna
    from optuna.storages import JournalStorage

    pruner = (
        optuna.pruners.MedianPruner(
            n_startup_trials=_UNPRUNED_TRIALS, n_warmup_steps=_UNPRUNED_ROUNDS
        )
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
            storage=JournalStorage(_open_backend(path)),
            load_if_exists=True,
        )
        stored = study.user_attrs.get(DIGEST)
        intact = stored != digest or (
            study.direction == direction
            and all(_is_intact(trial, spaces) for trial in study.get_trials(deepcopy=False))
        )
    except _DAMAGED:
        intact, stored = False, digest
    if stored not in (None, digest):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{folder}: contains a search with a different recipe, rows or arguments. Give "
            "another out.",
        )
    if not intact:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is damaged or was edited. Restore the file, or give another out.",
        )
    if stored is None:
        study.set_user_attr(DIGEST, digest)
    return study


def _is_intact(trial: FrozenTrial, spaces: Mapping[str, Space]) -> bool:
    """Returns whether a trial has the attributes and values that its state requires. May raise one
    of ``_DAMAGED`` if a value has the wrong type.
    """
    from optuna.trial import TrialState

    attributes, state = trial.user_attrs, trial.state
    if any(type(attributes.get(key, kind())) is not kind for key, kind in _ATTRIBUTE_TYPES.items()):
        return False
    if not all(spaces[key].has(value) for key, value in trial.params.items()):
        return False
    # ``math.isnan`` raises TypeError for a value that is not a number.
    _ = [math.isnan(value) for value in trial.intermediate_values.values()]
    # A trial of a running or killed driver may lack attributes.
    if state == TrialState.RUNNING or (state == TrialState.FAIL and ERROR not in attributes):
        return True
    if state == TrialState.WAITING:
        return PLACE in attributes
    intact = PLACE in attributes and trial.params.keys() == spaces.keys()
    if state == TrialState.COMPLETE:
        intact = intact and RUN in attributes and math.isfinite(trial.values[0])
    return intact


def _open_backend(path: Path) -> JournalFileBackend:
    """Opens a journal file for Optuna. Appending to it raises InputError if the disk is full."""
    from optuna.storages.journal import JournalFileBackend

    class CheckedBackend(JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            try:
                super().append_logs(logs)
            except OSError as error:
                raise write_error(path, error) from None

    return CheckedBackend(str(path), cast("Any", JournalLock(path)))


def get_ended_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the trials that have ended, in the order of their places. A failed trial is included
    only if it has an error message; otherwise its driver was killed.
    """
    from optuna.trial import TrialState

    successful = (TrialState.COMPLETE, TrialState.PRUNED)
    trials = study.get_trials(deepcopy=False, states=(*successful, TrialState.FAIL))
    ended = [trial for trial in trials if trial.state in successful or ERROR in trial.user_attrs]
    return sorted(ended, key=lambda trial: trial.user_attrs[PLACE])


def get_running_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Returns the trials that have begun and not ended, including the trials of killed drivers."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))


def requeue_trial(study: optuna.Study, trial: FrozenTrial, keys: Collection[str]) -> None:
    """Ends the trial of a killed driver, and queues a new trial with the same values.

    ``keys``: The keys of the recipe that are searched.
    """
    from optuna.trial import TrialState

    study.tell(trial.number, state=TrialState.FAIL)
    # If some values are missing, a new trial chooses all values again for the same place.
    if set(trial.params) == set(keys) and PLACE in trial.user_attrs:
        study.enqueue_trial(trial.params, user_attrs={PLACE: trial.user_attrs[PLACE]})


def find_next_place(study: optuna.Study, trial_count: int) -> int | None:
    """Returns the place of the next trial: the place of a queued trial, or otherwise the first free
    place below ``trial_count``. Returns None if all places are taken.
    """
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        return int(trial.user_attrs[PLACE])
    taken = {
        trial.user_attrs.get(PLACE)
        for trial in [*get_ended_trials(study), *get_running_trials(study)]
    }
    return next((place for place in range(trial_count) if place not in taken), None)


def begin_trial(
    study: optuna.Study, by: By, seed: int, place: int, driver: str, point: dict[str, Any] | None
) -> optuna.Trial:
    """Begins the trial with the number ``place``. ``point``: The values of the trial in a grid
    search.

    Each trial has a new sampler, whose seed depends on the search's seed and the place. So a
    resumed search chooses the same values as an uninterrupted search.
    """
    import optuna
    from optuna.trial import TrialState

    sampler_seed = (seed * _SEED_FACTOR + place) % 2**32
    study.sampler = (
        optuna.samplers.TPESampler(seed=sampler_seed)
        if by == "tpe"
        else optuna.samplers.RandomSampler(seed=sampler_seed)
    )
    if point is not None and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.enqueue_trial(point, user_attrs={PLACE: place})
    trial = study.ask()
    trial.set_user_attr(PLACE, place)
    trial.set_user_attr(DRIVER, driver)
    return trial
