"""Records how the inputs of a batch were made from a party's rows, so that another process of the
party can make the same inputs from its own copy of the rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Views:
    """The source of random views of a party's rows.

    Args:
        settings: The settings of the views, as JSON.
        pool: The positions of the rows that give replacements, int64 [P].
    """

    settings: str
    pool: Positions


@dataclass(frozen=True, eq=False)
class DrawnView:
    """One random view of a batch.

    Args:
        of: The source that drew the view.
        drawn: The state of the generator before the draws, uint8 [S].
        which: The position among the views that were drawn together, from 0.
        count: The number of views that were drawn together, 1 or 2.
    """

    of: Views
    drawn: Tensor
    which: int
    count: int


@dataclass(frozen=True, eq=False)
class BatchOrigin:
    """The origin of a batch's inputs.

    Args:
        rows: The positions of the batch's rows, int64 [B].
        others: The positions of the rows that give the values of ``column``, int64 [B]; None if no
            column is exchanged.
        column: The name of the exchanged column.
        view: The random view; None for unchanged rows.
    """

    rows: Positions
    others: Positions | None = None
    column: str = ""
    view: DrawnView | None = None


class BatchLog:
    """Remembers how batches were made, as long as their inputs exist and are unchanged."""

    def __init__(self) -> None:
        # For the first input of each batch: its origin, the other inputs, and the versions of all
        # inputs.
        self._origins = WeakTensorKeyDictionary()

    def note(self, inputs: Sequence[Tensor], made: BatchOrigin) -> None:
        """Remembers the origin ``made`` of an encoder's arguments."""
        self._origins[inputs[0]] = made, tuple(inputs[1:]), _get_versions(inputs)

    def of(self, inputs: Sequence[Tensor]) -> BatchOrigin | None:
        """Returns the origin of the inputs; None if a phase has made or changed one of them."""
        entry = self._origins.get(inputs[0])  # type: ignore[no-untyped-call]
        if entry is None:
            return None
        origin, other_inputs, versions = entry
        are_same = len(inputs) == 1 + len(other_inputs) and all(
            map(operator.is_, inputs[1:], other_inputs)
        )
        return origin if are_same and versions == _get_versions(inputs) else None


def _get_versions(inputs: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in inputs]
