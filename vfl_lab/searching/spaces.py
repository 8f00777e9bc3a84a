"""Defines the search space: the possible values of each searched key of a recipe."""

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

# The keys that define a range of numbers.
KEYS = {"from", "to", "log"}


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
