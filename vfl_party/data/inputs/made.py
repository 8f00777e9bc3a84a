"""Records how the inputs of a batch were made from a party's rows, so that another process of the
party can make them from its copy.
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
        settings: as JSON.
        pool: int64 [P], positions of the rows that give replacements.
    """

    settings: str
    pool: Positions


@dataclass(frozen=True, eq=False)
class DrawnView:
    """One random view of a batch.

    Args:
        of: the source that drew it.
        drawn: uint8 [S], the state of the generator before the draws.
        which: position among the views drawn together, from 0.
        count: number of views drawn together, 1 or 2.
    """

    of: Views
    drawn: Tensor
    which: int
    count: int


@dataclass(frozen=True, eq=False)
class BatchOrigin:
    """How a batch was made.

    Args:
        rows: int64 [B], positions of its rows.
        others: int64 [B], positions of the rows that give one column; None without such.
        column: the name of that column.
        view: the random view; None for unchanged rows.
    """

    rows: Positions
    others: Positions | None = None
    column: str = ""
    view: DrawnView | None = None


class BatchLog:
    """Remembers how batches were made, as long as their inputs live unchanged."""

    def __init__(self) -> None:
        # {first input: (how the batch was made, the other inputs, versions of all inputs)}.
        self._made = WeakTensorKeyDictionary()

    def note(self, inputs: Sequence[Tensor], made: BatchOrigin) -> None:
        """Remembers ``made`` for an encoder's arguments."""
        self._made[inputs[0]] = made, tuple(inputs[1:]), _writes(inputs)

    def of(self, inputs: Sequence[Tensor]) -> BatchOrigin | None:
        """Returns how the inputs were made; None if a phase made or changed any of them."""
        entry = self._made.get(inputs[0])  # type: ignore[no-untyped-call]
        if entry is None:
            return None
        made, others, writes = entry
        same = len(inputs) == 1 + len(others) and all(map(operator.is_, inputs[1:], others))
        return made if same and writes == _writes(inputs) else None


def _writes(inputs: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in inputs]
