"""Describes errors in a request's body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of a request",
    "list_type": "must be a list",
    "dict_type": "must be an object: a list of values for each column",
    "string_type": "must be text, in quotes",
    "string_unicode": "must be text of valid characters",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "too_short": "must not be empty",
}
_CELL = "must be a number, text, true, false or null"


def describe_faults(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each part of a body that is wrong, from pydantic's errors.

    What was given may be an id, so no sentence repeats it.
    """
    texts: dict[str, str] = {}
    for fault in faults:
        path = _path(fault["loc"][1:])
        words = _WORDS.get(fault["type"], fault["msg"])
        # Pydantic lists an error for each type that a cell may have.
        if path[:1] == ["columns"] and isinstance(path[-1], int):
            words = _CELL
        texts.setdefault(".".join(map(str, path)), words)
    # An error inside a nested list is more specific than that of the list.
    within = {path.rpartition(".")[0] for path in texts}
    return [f"{path}: {words}" for path, words in texts.items() if path not in within]


def _path(loc: Sequence[str | int]) -> list[str | int]:
    """Leaves out pydantic's names of types: they follow the place in a list."""
    path: list[str | int] = []
    was_place = False
    for part in loc:
        if not (was_place and isinstance(part, str)):
            path.append(part)
        was_place = isinstance(part, int)
    return path
