"""Lowers a paper's batch sizes, queue sizes and label counts if there are too few rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vfl.preparing.content import TRAIN, Array, ContentPart, Rows

# The defaults of a recipe's ``rows.validation`` and ``rows.test``.
_VALIDATION, _TEST = 0.1, 0.2


def count_training_rows(
    parts: Sequence[ContentPart], used: Rows, splits: Array | None, rows: Mapping[str, Any]
) -> list[int]:
    """Returns the number of training rows of each party with features.

    ``rows``: The table ``rows`` of the recipe.
    """
    rows_by_party = [
        used if part.rows is None else part.rows for part in parts if part.pick is not None
    ]
    if splits is not None:
        return [int((splits[numbers] == TRAIN.encode()).sum()) for numbers in rows_by_party]
    # In cross-validation, one fold replaces the test rows.
    test = 1 / rows["folds"] if "folds" in rows else rows.get("test", _TEST)
    shares = rows.get("validation", _VALIDATION), test
    return [
        len(numbers) - sum(math.ceil(len(numbers) * share) for share in shares)
        for numbers in rows_by_party
    ]


def fit(
    tables: Mapping[str, Any], counts: Sequence[int], *, dealt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Lowers values of a recipe that are too large for the number of rows. Returns the changed
    tables, and a note for each lowered value.

    Args:
        tables: The tables of the recipe.
        counts: The number of training rows of each party.
        dealt: Whether the parties have different rows.
    """
    rows, notes = dict(tables["rows"]), []
    smallest = max(1, min(counts))
    common = max(1, int(smallest * rows.get("aligned", 1.0)))
    if rows.get("labelled", 0) > common:
        notes.append(_describe_lowering("rows.labelled", rows["labelled"], common))
        rows["labelled"] = common
    phases = []
    for phase in tables["phases"]:
        limits = {
            "batch_size": common if phase["kind"] == "fedhssl" else smallest,
            "queue": max(1, (sum(counts) if dealt else smallest) - 1),
        }
        for key, limit in limits.items():
            if phase.get(key, 0) > limit:
                notes.append(_describe_lowering(f"{phase['kind']}.{key}", phase[key], limit))
                phase = phase | {key: limit}
        phases.append(phase)
    return dict(tables) | {"rows": rows, "phases": phases}, notes


def _describe_lowering(key: str, paper_value: int, value: int) -> str:
    return f"{key} is {value:,} (paper: {paper_value:,}), because there are fewer training rows."
