"""How the inputs of a batch were made of a party's rows: so that another process of the party can
make them of its own copy of the rows.
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
    """What makes random views of a party's rows.

    ``settings``: as JSON. ``pool``: positions of the rows that give replacements, int64 [P].
    """

    settings: str
    pool: Positions


@dataclass(frozen=True, eq=False)
class DrawnView:
    """One random view of a batch.

    Args:
        of: what drew it.
        drawn: the state of the generator before the draws, uint8 [S].
        which: the place among the views that were drawn together, from 0.
        count: how many were drawn together, 1 or 2.
    """

    of: Views
    drawn: Tensor
    which: int
    count: int


@dataclass(frozen=True, eq=False)
class Made:
    """How a batch was made.

    Args:
        rows: positions of its rows, int64 [B].
        others: positions of the rows that give one column, int64 [B]; None: none do.
        column: the name of that column.
        view: the random view; None: the rows as they are.
    """

    rows: Positions
    others: Positions | None = None
    column: str = ""
    view: DrawnView | None = None


class Noted:
    """Remembers of a batch's inputs how they were made, as long as they live and stay the same."""

    def __init__(self) -> None:
        # {first input: (how the batch was made, the other inputs, versions of all inputs)}.
        self._made = WeakTensorKeyDictionary()

    def note(self, inputs: Sequence[Tensor], made: Made) -> None:
        """Remembers ``made`` for an encoder's arguments."""
        self._made[inputs[0]] = made, tuple(inputs[1:]), _writes(inputs)

    def of(self, inputs: Sequence[Tensor]) -> Made | None:
        """Returns how the inputs were made; None if a phase has made or changed any of them."""
        entry = self._made.get(inputs[0])  # type: ignore[no-untyped-call]
        if entry is None:
            return None
        made, others, writes = entry
        same = len(inputs) == 1 + len(others) and all(map(operator.is_, inputs[1:], others))
        return made if same and writes == _writes(inputs) else None


def _writes(inputs: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in inputs]
