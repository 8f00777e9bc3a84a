"""Divides the rows of a split by the parties that hold them (``rows.partial``): one part for each
set of parties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vfl_common.summary import name_holders
from vfl_party.base.seeds import Rows
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk

# The name of the metric with a part's number of rows.
ROWS = "rows"


def by_holders(
    party: Party, split: str, rows: Rows, outputs: Tensor
) -> dict[str, tuple[Rows, Tensor]]:
    """Returns {name of a part: (its rows, their outputs [N, O])}; empty if all parties hold all
    rows.

    Parts are named by the parties that have features.
    """
    held = party.data.held
    if held is None:
        return {}
    own = () if party.features is None else (party.name,)
    return {
        name_holders(split, (*own, *names)): (rows[at], party.take(outputs, at))
        for names, at in held.by_holders(rows)
    }


def select_common(rows: Rows, chunks: Sequence[Chunk]) -> tuple[Rows, list[Chunk]]:
    """Returns the rows that all parties hold, and their embeddings.

    ``found``: the embeddings of ``rows``, in order.
    """
    common, whole, first = [], list[Chunk](), 0
    for chunk in chunks:
        for part, at in chunk.by_holders():
            if all(z is not None for z in part.others.values()):
                common.append(rows[first + at])
                whole.append(part)
        first += chunk.rows
    return np.concatenate(common) if common else rows[:0], whole


def with_counts(
    party: Party,
    metrics: dict[str, dict[str, float]],
    predictions: Mapping[str, tuple[Rows, Tensor]],
) -> dict[str, dict[str, float]]:
    """Adds the number of rows to the metrics of each split and part, if not all parties hold all
    rows.
    """
    if party.data.held is None:
        return metrics
    return {name: {**of, ROWS: float(len(predictions[name][0]))} for name, of in metrics.items()}
