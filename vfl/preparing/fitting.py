"""Fits a paper's batches, queues and labels to fewer rows than the paper has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vfl.preparing.content import TRAIN, Array, ContentPart, Rows

# The shares that a recipe uses for rows without a split (``rows.validation`` and ``rows.test``).
_VALIDATION, _TEST = 0.1, 0.2


def training_rows(
    parts: Sequence[ContentPart], used: Rows, splits: Array | None, rows: Mapping[str, Any]
) -> list[int]:
    """Returns how many training rows each party with features has; ``rows``: the recipe's table."""
    owned = [used if part.rows is None else part.rows for part in parts if part.pick is not None]
    if splits is not None:
        return [int((splits[own] == TRAIN.encode()).sum()) for own in owned]
    # With folds, one of them replaces the test rows.
    test = 1 / rows["folds"] if "folds" in rows else rows.get("test", _TEST)
    apart = rows.get("validation", _VALIDATION), test
    return [len(own) - sum(math.ceil(len(own) * share) for share in apart) for own in owned]


def fit(
    tables: Mapping[str, Any], counts: Sequence[int], *, dealt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns a recipe's tables with possible values, and a note for each value that is lower than
    the paper's.

    ``counts``: the training rows of each party; ``dealt``: whether these are different rows.
    """
    rows, notes = dict(tables["rows"]), []
    smallest = max(1, min(counts))
    common = max(1, int(smallest * rows.get("aligned", 1.0)))
    if rows.get("labelled", 0) > common:
        notes.append(_lower_note("rows.labelled", rows["labelled"], common))
        rows["labelled"] = common
    phases = []
    for phase in tables["phases"]:
        limits = {
            "batch_size": common if phase["kind"] == "fedhssl" else smallest,
            "queue": max(1, (sum(counts) if dealt else smallest) - 1),
        }
        for key, limit in limits.items():
            if phase.get(key, 0) > limit:
                notes.append(_lower_note(f"{phase['kind']}.{key}", phase[key], limit))
                phase = phase | {key: limit}
        phases.append(phase)
    return dict(tables) | {"rows": rows, "phases": phases}, notes


def _lower_note(key: str, paper: int, now: int) -> str:
    return f"{key} is {now:,} (paper: {paper:,}), because there are fewer training rows."
