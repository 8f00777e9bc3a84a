"""Divides the rows of a split into groups by the set of parties that hold them
(``rows.partial``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vfl_common.summary import name_holders
from vfl_party.base.seeds import Rows
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk

# The name of the metric that gives the number of rows of a group.
ROWS = "rows"


def divide_by_holders(
    party: Party, split: str, rows: Rows, outputs: Tensor
) -> dict[str, tuple[Rows, Tensor]]:
    """Returns {name of a group: (the group's rows, their outputs [N, O])}; empty if all parties
    hold all rows.

    A group's name lists the parties that hold its rows and have features.
    """
    held_rows = party.data.held
    if held_rows is None:
        return {}
    own_name = () if party.features is None else (party.name,)
    return {
        name_holders(split, (*own_name, *names)): (rows[places], party.take(outputs, places))
        for names, places in held_rows.by_holders(rows)
    }


def select_common(rows: Rows, chunks: Sequence[Chunk]) -> tuple[Rows, list[Chunk]]:
    """Returns the rows that all parties hold, and their embeddings. ``chunks``: the embeddings of
    ``rows``, in order.
    """
    common, common_chunks, start = [], list[Chunk](), 0
    for chunk in chunks:
        for part, places in chunk.by_holders():
            if all(z is not None for z in part.others.values()):
                common.append(rows[start + places])
                common_chunks.append(part)
        start += chunk.rows
    return np.concatenate(common) if common else rows[:0], common_chunks


def add_row_counts(
    party: Party,
    metrics: dict[str, dict[str, float]],
    predictions: Mapping[str, tuple[Rows, Tensor]],
) -> dict[str, dict[str, float]]:
    """Adds the number of rows to the metrics of each split and group of rows, unless all parties
    hold all rows.
    """
    if party.data.held is None:
        return metrics
    return {
        name: {**values, ROWS: float(len(predictions[name][0]))} for name, values in metrics.items()
    }
