"""Fits a paper's batches, queues and labels to fewer rows than the paper has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vfl.preparing.content import TRAIN, Array, Part, Rows

# What a recipe sets apart of rows that have no split (``rows.validation`` and ``rows.test``).
_VALIDATION, _TEST = 0.1, 0.2


def training_rows(
    parts: Sequence[Part], used: Rows, splits: Array | None, rows: Mapping[str, Any]
) -> list[int]:
    """Returns how many training rows each party with features has; ``rows``: the recipe's table."""
    shares = rows.get("validation", _VALIDATION) + rows.get("test", _TEST)
    found = []
    for part in parts:
        if part.pick is not None:
            own = used if part.rows is None else part.rows
            count = (
                len(own) * (1 - shares) if splits is None else (splits[own] == TRAIN.encode()).sum()
            )
            found.append(int(count))
    return found


def fitted(
    tables: Mapping[str, Any], counts: Sequence[int], *, dealt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns a recipe's tables with numbers that are possible, and a sentence for each one that is
    lower than the paper's.

    ``counts``: the training rows of each party; ``dealt``: whether these are different rows.
    """
    rows, notes = dict(tables["rows"]), []
    least = min(counts)
    common = max(1, int(least * rows.get("aligned", 1.0)))
    if rows.get("labelled", 0) > common:
        notes.append(_lowered("rows.labelled", rows["labelled"], common))
        rows["labelled"] = common
    phases = []
    for phase in tables["phases"]:
        most = {
            "batch_size": common if phase["kind"] == "fedhssl" else least,
            "queue": max(1, (sum(counts) if dealt else least) - 1),
        }
        for key, limit in most.items():
            if phase.get(key, 0) > limit:
                notes.append(_lowered(f"{phase['kind']}.{key}", phase[key], limit))
                phase = phase | {key: limit}
        phases.append(phase)
    return dict(tables) | {"rows": rows, "phases": phases}, notes


def _lowered(key: str, paper: int, now: int) -> str:
    return f"{key} is {now:,}, and {paper:,} in the paper: there are fewer training rows."
