"""Describes which party holds which rows, if not every party holds all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vfl_party.base.seeds import Rows

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """The holders of the N rows of a run, if not every party holds all rows. The active party holds
    all of them.

    Args:
        splits: For each split, its positions in the order of all rows; see ``PartyData``.
        by: For each passive party, bool [N], whether it holds each row. A passive party has only
            its own entry.
    """

    splits: Mapping[str, Rows]
    by: Mapping[str, Mask]

    def of(self, party: str, rows: Rows) -> Rows:
        """Returns the positions in ``rows`` of the rows that a passive party holds, ascending."""
        return np.flatnonzero(self.by[party][rows])

    def own(self, party: str, rows: Rows) -> Rows:
        """Returns the rows among ``rows`` that a passive party holds, numbered as in its table."""
        return self._row_counts[party][rows[self.by[party][rows]]]

    def counts(self, rows: Rows) -> dict[str, int]:
        """Returns how many of ``rows`` each passive party holds, without parties that hold none."""
        totals = {name: int(held[rows].sum()) for name, held in self.by.items()}
        return {name: count for name, count in totals.items() if count}

    def by_holders(self, rows: Rows) -> list[tuple[tuple[str, ...], Rows]]:
        """Groups ``rows`` by their holders. Returns for each group the passive parties that hold
        its rows, and the positions of its rows in ``rows``. Groups are in the order of ``by``.
        """
        return group_rows(list(self.by), [held[rows] for held in self.by.values()])

    @cached_property
    def _row_counts(self) -> dict[str, Rows]:
        """For each passive party, the number of its rows before each row, [N]."""
        return {name: np.cumsum(held) - held for name, held in self.by.items()}


def group_rows(names: Sequence[str], held: Sequence[Mask]) -> list[tuple[tuple[str, ...], Rows]]:
    """Groups rows with the same holders; see ``by_holders``. ``held``: For each name, bool [N],
    whether it holds each row.
    """
    patterns, group_N = np.unique(np.stack(held, axis=1), axis=0, return_inverse=True)
    group_N = group_N.reshape(-1)
    return [
        (
            tuple(name for name, is_holder in zip(names, mask, strict=True) if is_holder),
            np.flatnonzero(group_N == number),
        )
        for number, mask in enumerate(patterns)
    ]
