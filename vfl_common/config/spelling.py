"""A recipe's canonical form, and the comparison of two parties' or two releases' recipes."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# {table: keys that are in the canonical form even with their default values}. A key of a later
# release is not listed: it is in the canonical form only if its value is not the default, so that
# the digests of older recipes do not change. If its default ever changes, add the key here, so that
# a run with the former default is not resumed with the new one.
_ALWAYS_WRITTEN = {
    table: frozenset(keys.split())
    for table, keys in {
        "": "name preset seed server task parties rows model phases start run",
        "task": "kind classes metrics",
        "parties": "name role features encoder",
        "rows": "split validation test aligned labelled",
        "model": "embedding_size combine encoder top precision",
        "encoder": "kind hidden activation batch_norm dropout category_size channels shared "
        "small_images factory"
        " options settings",
        "top": "hidden dropout",
        "phases": "kind name codec transforms settings",
        "transforms": "kind exchange sent_by settings",
        "wire": "codec phase exchange direction settings",
        "start": "run phases tower",
        "run": "rejoin_deadline_s join_deadline_s step_timeout_s heartbeat_s lost_after_s "
        "server_absent_s"
        " checkpoint_every kept_checkpoints",
    }.items()
}


@dataclass(frozen=True)
class Spelling:
    """One party's recipe, for a comparison. ``filled``: {dotted key: value}, including defaults.
    ``written``: the dotted keys that the recipe's file sets.
    """

    filled: Mapping[str, Any]
    written: frozenset[str]

    def difference(self, theirs: Spelling) -> tuple[str, Any, Any] | None:
        """Finds a key by which the recipes of two releases differ: (dotted key, our value, theirs).
        Returns None if they agree.

        A key that both releases know must have the same value on both sides, written or not. A key
        that only one release knows must not be written there, because its default is the behaviour
        of the other release. A value that is missing on one side is ``None`` in the result.
        """
        ours, others = self.filled, theirs.filled
        for key in sorted(ours.keys() | others.keys()):
            if key in ours and key in others:
                if ours[key] != others[key]:
                    return key, ours[key], others[key]
            elif key in (self.written if key in ours else theirs.written):
                return key, ours.get(key), others.get(key)
        # A key may be a table in one release and a plain value in the other.
        for key in _list_tables(ours, others):
            return key, ours[key], "a table"
        for key in _list_tables(others, ours):
            return key, "a table", others[key]
        return None


def drop_newer_keys(full: Any, own: Any, table: str = "") -> Any:
    """Returns the settings ``full`` without keys of later releases that have their default values.
    ``own``: the same settings without defaults.
    """
    if isinstance(full, list):
        items = own if isinstance(own, list) else [{}] * len(full)
        return [
            drop_newer_keys(item, non_default, table)
            for item, non_default in zip(full, items, strict=True)
        ]
    if not isinstance(full, dict):
        return full
    non_default, always = (
        own if isinstance(own, dict) else {},
        _ALWAYS_WRITTEN.get(table, frozenset()),
    )
    keys = (key for key in full if key in non_default or key in always)
    return {key: drop_newer_keys(full[key], non_default.get(key), key) for key in keys}


def _list_tables(keys: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Returns the keys, sorted, that are tables in ``others``."""
    known = sorted(others)
    after = {key: bisect.bisect_left(known, f"{key}.") for key in sorted(keys)}
    return [
        key
        for key, place in after.items()
        if place < len(known) and known[place].startswith(f"{key}.")
    ]


def flatten_tables(value: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested tables into {dotted key: value}. A list without tables stays one value."""
    return _flatten(value, whole=True)


def _flatten(value: Any, prefix: str = "", *, whole: bool = False) -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and not (
        whole and not any(isinstance(item_, dict) for item_ in value)
    ):
        items = ((str(index), item) for index, item in enumerate(value))  # type: ignore[assignment]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        # A recipe's file does not contain the key "settings".
        path = prefix if key == "settings" else f"{prefix}.{key}" if prefix else str(key)
        flat |= _flatten(item, path, whole=whole)
    return flat


def find_first_difference(ours: str, theirs: str) -> tuple[str, Any, Any] | None:
    """Finds the first key, in sorted order, by which two canonical JSON texts differ: (dotted key,
    our value, theirs).

    A value that is missing on one side is ``None``. Returns None if the texts are equal.
    """
    left, right = _flatten(json.loads(ours)), _flatten(json.loads(theirs))
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            return key, left.get(key), right.get(key)
    return None
