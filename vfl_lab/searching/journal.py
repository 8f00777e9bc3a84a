"""Stores the trials of a search in Optuna's journal, from which a killed search is resumed."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vfl_common.errors import Code, InputError

if TYPE_CHECKING:
    from optuna import Trial

import contextlib
import math
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Self, cast

from vfl_common.files import hold_lock, lock_file, write_error

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


_FOLDER = ".drivers"


# The files that a driver locks while it chooses a trial, and while it writes the journal.
_CHOOSING, _WRITING = "choosing", "writing"


# The number of bytes to read at a time when looking for the journal's last line end.
_BLOCK = 1 << 12


# Drivers are programs that work on the same search, on one machine or on several machines that
# share the folder of the search.
#
# Each driver locks its own file. The operating system releases the lock when the driver ends, even
# by a crash. Another driver can then repeat the unfinished trial.
class Claims:
    """The locks of one driver, as a context manager. ``driver`` is a random name for this driver.

    Raises InputError if the folder cannot be written or its file system does not support locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.driver = folder / _FOLDER, secrets.token_hex(8)
        self._file = _open_lock(folder, self.driver)
        self._choice_file = _open_lock(folder, _CHOOSING)
        try:
            lock_file(self._file, wait=True)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: the file system does not support locks ({error.strerror}). Give the "
                "search a folder on another file system.",
            ) from None

    @contextlib.contextmanager
    def lock_choice(self) -> Iterator[None]:
        """Locks the choice of the next trial for a block. Only one driver at a time is in the
        block.
        """
        with hold_lock(self._choice_file):
            yield

    def is_running(self, driver: str | None) -> bool:
        """Returns whether the driver of this name is still running."""
        if driver == self.driver:
            return True
        path = self._folder / str(driver)
        try:
            with path.open("r+") as file:
                if not lock_file(file, wait=False):
                    return True
        except OSError:
            return False
        # Names are random, so no other driver will use this file.
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        """Releases all locks of this driver."""
        (self._folder / self.driver).unlink(missing_ok=True)
        self._file.close()
        self._choice_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JournalLock:
    """The lock of a search's journal, with Optuna's interface for locks. Optuna's own locks are not
    released when a program is killed.

    ``acquire`` also removes an incomplete last line, which a full disk or a power failure may
    leave. Optuna ignores an incomplete line only as long as no other line follows.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Waits for the lock, and removes an incomplete last line of the journal."""
        self._file = _open_lock(self._journal.parent, _WRITING)
        lock_file(self._file, wait=True)
        with self._journal.open("r+b") as lines:
            _remove_incomplete_line(lines)
        return True

    def release(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()


def _remove_incomplete_line(file: IO[bytes]) -> None:
    """Truncates a file after its last line end."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        length = file.read(end - begin).rfind(b"\n") + 1
        end = begin + length
        if length:
            break
    if end < size:
        file.truncate(end)


def _open_lock(folder: Path, name: str) -> IO[str]:
    """Opens a lock file for writing, which network file systems require for locks. Raises
    InputError.
    """
    path = folder / _FOLDER / name
    try:
        path.parent.mkdir(exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as error:
        raise write_error(path, error) from None


# The keys that define a range of numbers.
KEYS = {"from", "to", "log"}


# the possible values of each searched key of a recipe.
@dataclass(frozen=True)
class Choice:
    """A space that consists of a list of values."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> list[Any]:
        """The values as Optuna's journal stores them. A list or dict is stored as JSON text."""
        return [
            value
            if value is None or isinstance(value, bool | int | float | str)
            else json.dumps(value)
            for value in self.values
        ]

    def has(self, label: Any) -> bool:
        """Returns whether a label from the journal stands for one of the values."""
        return label in self.labels

    def ask(self, trial: Trial, key: str) -> Any:
        """Returns the value that a trial tries."""
        return self.values[self.labels.index(trial.suggest_categorical(key, self.labels))]


@dataclass(frozen=True)
class Between:
    """A space of the numbers in a closed interval: integers if both bounds are integers."""

    low: float
    high: float
    log: bool = False

    def has(self, number: Any) -> bool:
        """Returns whether a number from the journal is in the interval. Raises TypeError if it is
        not a number.
        """
        return bool(self.low <= number <= self.high)

    def ask(self, trial: Trial, key: str) -> Any:
        """Returns the value that a trial tries."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)


Space = Choice | Between


def parse_spaces(spaces: Mapping[str, Any]) -> dict[str, Space]:
    """Parses spaces such as ``{key: [values]}`` or ``{key: {"from": low, "to": high, "log":
    True}}``. Raises InputError.
    """
    if not isinstance(spaces, Mapping) or not spaces:
        raise InputError(
            Code.CONFIG_INVALID,
            "spaces: must be a non-empty dict. Give {key: [values]}, or {key: {'from': low, "
            "'to': high}}.",
        )
    for key in spaces:
        if not isinstance(key, str) or not key:
            raise InputError(
                Code.CONFIG_INVALID,
                f"spaces: a key must be text (got {key!r}). Give one such as "
                "'model.embedding_size'.",
            )
        parent = next((other for other in spaces if key.startswith(f"{other}.")), None)
        if parent is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"spaces: {parent} contains {key}. Give a space for only one of them.",
            )
    return {key: _parse_space(key, space) for key, space in spaces.items()}


def list_grid_points(spaces: Mapping[str, Space]) -> list[dict[str, Any]]:
    """Returns all combinations of values, as Optuna's journal stores them. Raises InputError if a
    space is an interval.
    """
    lists: list[Sequence[Any]] = []
    for key, space in spaces.items():
        if not isinstance(space, Choice):
            raise InputError(
                Code.CONFIG_INVALID,
                f"spaces: {key}: a grid needs a list of values. Give a list, or by='tpe'.",
            )
        lists.append(space.labels)
    return [dict(zip(spaces, point, strict=True)) for point in itertools.product(*lists)]


def _parse_space(key: str, space: Any) -> Space:
    where = f"spaces: {key}"
    if isinstance(space, Mapping):
        return _parse_interval(where, space)
    space = space.tolist() if hasattr(space, "tolist") else space
    # A set is refused, because the trials depend on the order of the values.
    if not isinstance(space, Iterable) or isinstance(space, str | bytes | Set):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: must be a list or a range (got {space!r}). Give a list of values, or "
            f"{{'from': low, 'to': high}}.",
        )
    values = tuple(space)
    if not values:
        raise InputError(Code.CONFIG_INVALID, f"{where}: is empty. Give at least one value.")
    try:
        labels = [json.dumps(value, allow_nan=False) for value in values]
    except (TypeError, ValueError):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: has a value that cannot be written into a recipe. Give texts, numbers, "
            "booleans or lists.",
        ) from None
    if len(set(labels)) < len(labels):
        raise InputError(Code.CONFIG_INVALID, f"{where}: contains a value twice. Remove one.")
    return Choice(values)


def _parse_interval(where: str, space: Mapping[str, Any]) -> Between:
    unknown = next((key for key in space if key not in KEYS), None)
    if unknown is not None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: unknown key {unknown!r}. Give from, to and, optionally, log.",
        )
    low, high, log = space.get("from"), space.get("to"), space.get("log", False)
    if not all(
        isinstance(bound, int | float) and not isinstance(bound, bool) for bound in (low, high)
    ):
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: from and to must be numbers. Give two numbers."
        )
    if not isinstance(log, bool):
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: log: must be boolean (got {log!r}). Give True or False."
        )
    assert low is not None  # noqa: S101 - checked above
    assert high is not None  # noqa: S101 - checked above
    if not -float("inf") < low < high < float("inf"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: from must be less than to (got {low!r} and {high!r}). Correct one of them.",
        )
    # Optuna needs the difference of the bounds, which must be finite.
    if max(-low, high) > sys.float_info.max / 2:
        raise InputError(
            Code.CONFIG_INVALID, f"{where}: from and to are too far apart. Give a smaller range."
        )
    if log and low <= 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: from must be greater than 0 if log is set (got {low!r}). Correct it, or "
            "leave log out.",
        )
    return Between(low, high, log)


def write_spaces(spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Converts spaces to JSON values, in the format that ``parse_spaces`` reads."""
    return {
        key: {"from": space.low, "to": space.high, "log": space.log}
        if isinstance(space, Between)
        else list(space.values)
        for key, space in spaces.items()
    }
