"""What a search may choose from: values of a recipe's keys."""

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

# Of a space between two numbers.
KEYS = {"from", "to", "log"}


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    @property
    def labels(self) -> list[Any]:
        """The values as the journal has them: texts for those that are no simple ones."""
        return [
            each if each is None or isinstance(each, bool | int | float | str) else json.dumps(each)
            for each in self.values
        ]

    def has(self, label: Any) -> bool:
        """Returns whether a label of the journal is that of one of them."""
        return label in self.labels

    def ask(self, trial: Trial, key: str) -> Any:
        """Returns the value that a trial tries."""
        return self.values[self.labels.index(trial.suggest_categorical(key, self.labels))]


@dataclass(frozen=True)
class Between:
    """A number between two, both of which it may be; a whole number if both are."""

    low: float
    high: float
    log: bool = False

    def has(self, number: Any) -> bool:
        """Returns whether a number of the journal is between both, or one of them. Raises TypeError
        if it is no number.
        """
        return bool(self.low <= number <= self.high)

    def ask(self, trial: Trial, key: str) -> Any:
        """Returns the value that a trial tries."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(key, self.low, self.high, log=self.log)
        return trial.suggest_float(key, self.low, self.high, log=self.log)


Space = Choice | Between


def spaces_of(given: Mapping[str, Any]) -> dict[str, Space]:
    """Reads ``{key: [values]}`` and ``{key: {"from": low, "to": high, "log": True}}``. Raises
    InputError.
    """
    if not isinstance(given, Mapping) or not given:
        text = "spaces: give {key: [values]}, or {key: {'from': low, 'to': high}}"
        raise InputError(Code.CONFIG_INVALID, text)
    for key in given:
        if not isinstance(key, str) or not key:
            text = f"spaces: a key is a text such as 'model.embedding_size', not {key!r}"
            raise InputError(Code.CONFIG_INVALID, text)
        above = next((other for other in given if key.startswith(f"{other}.")), None)
        if above is not None:
            text = f"spaces: {above} has {key} in it; give a space for one of them"
            raise InputError(Code.CONFIG_INVALID, text)
    return {key: _space(key, each) for key, each in given.items()}


def points(spaces: Mapping[str, Space]) -> list[dict[str, Any]]:
    """Returns all combinations of choices, as the journal has them. Raises InputError if a space
    is no choice.
    """
    lists: list[Sequence[Any]] = []
    for key, each in spaces.items():
        if not isinstance(each, Choice):
            text = f"spaces: {key}: a grid needs a list of values; give one, or by='tpe'"
            raise InputError(Code.CONFIG_INVALID, text)
        lists.append(each.labels)
    return [dict(zip(spaces, chosen, strict=True)) for chosen in itertools.product(*lists)]


def _space(key: str, given: Any) -> Space:
    where = f"spaces: {key}"
    if isinstance(given, Mapping):
        return _between(where, given)
    given = given.tolist() if hasattr(given, "tolist") else given
    # A set has no order, which what is tried depends on.
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Set):
        text = f"{where}: give a list of values, or {{'from': low, 'to': high}}, not {given!r}"
        raise InputError(Code.CONFIG_INVALID, text)
    values = tuple(given)
    if not values:
        raise InputError(Code.CONFIG_INVALID, f"{where}: give at least one value")
    try:
        labels = [json.dumps(each, allow_nan=False) for each in values]
    except (TypeError, ValueError):
        text = f"{where}: give values that a recipe's file can hold"
        raise InputError(Code.CONFIG_INVALID, text) from None
    if len(set(labels)) < len(labels):
        raise InputError(Code.CONFIG_INVALID, f"{where}: a value is given twice; remove one")
    return Choice(values)


def _between(where: str, given: Mapping[str, Any]) -> Between:
    odd = next((key for key in given if key not in KEYS), None)
    if odd is not None:
        text = f"{where}: there is no {odd!r}; give from, to and, if you want, log"
        raise InputError(Code.CONFIG_INVALID, text)
    low, high, log = given.get("from"), given.get("to"), given.get("log", False)
    if not all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in (low, high)
    ):
        raise InputError(Code.CONFIG_INVALID, f"{where}: give two numbers as from and to")
    if not isinstance(log, bool):
        raise InputError(Code.CONFIG_INVALID, f"{where}: log: give True or False, not {log!r}")
    assert low is not None  # noqa: S101 - checked above
    assert high is not None  # noqa: S101 - checked above
    if not -float("inf") < low < high < float("inf"):
        text = f"{where}: from must be below to, not {low!r} and {high!r}"
        raise InputError(Code.CONFIG_INVALID, text)
    # Whose distance is a number, too.
    if max(-low, high) > sys.float_info.max / 2:
        raise InputError(Code.CONFIG_INVALID, f"{where}: from and to are too far apart")
    if log and low <= 0:
        raise InputError(Code.CONFIG_INVALID, f"{where}: log needs a from above 0, not {low!r}")
    return Between(low, high, log)


def written(spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Returns spaces as ``spaces_of`` reads them, in JSON's values."""
    return {
        key: {"from": each.low, "to": each.high, "log": each.log}
        if isinstance(each, Between)
        else list(each.values)
        for key, each in spaces.items()
    }
