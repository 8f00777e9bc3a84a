"""Rows of which a party holds some, in an order that all parties use."""

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
    """The N rows of a run, if not every party holds each. The active party holds them all.

    Args:
        splits: {name: places in the order of all rows}, see ``PartyData``.
        by: {passive party: whether it holds each row, [N]}. A passive party knows its own alone.
    """

    splits: Mapping[str, Rows]
    by: Mapping[str, Mask]

    def of(self, party: str, rows: Rows) -> Rows:
        """Returns which of ``rows`` a passive party holds: their places in ``rows``, ascending."""
        return np.flatnonzero(self.by[party][rows])

    def own(self, party: str, rows: Rows) -> Rows:
        """Returns the rows among ``rows`` that a passive party holds, as it counts its own rows."""
        return self._number[party][rows[self.by[party][rows]]]

    def counts(self, rows: Rows) -> dict[str, int]:
        """Returns {passive party: how many of ``rows`` it holds}, without those that hold none."""
        totals = {name: int(held[rows].sum()) for name, held in self.by.items()}
        return {name: count for name, count in totals.items() if count}

    def by_holders(self, rows: Rows) -> list[tuple[tuple[str, ...], Rows]]:
        """Divides ``rows`` by who holds them: returns the passive parties of each group, and the
        group's places in ``rows``. The groups come in the order of their parties in ``by``.
        """
        return group_rows(list(self.by), [held[rows] for held in self.by.values()])

    @cached_property
    def _number(self) -> dict[str, Rows]:
        """{passive party: the number of its rows before each row, [N]}."""
        return {name: np.cumsum(held) - held for name, held in self.by.items()}


def group_rows(names: Sequence[str], held: Sequence[Mask]) -> list[tuple[tuple[str, ...], Rows]]:
    """Groups rows with the same holders; see ``by_holders``. ``held``: [N] for each name."""
    patterns, group_N = np.unique(np.stack(held, axis=1), axis=0, return_inverse=True)
    group_N = group_N.reshape(-1)
    return [
        (
            tuple(name for name, there in zip(names, mask, strict=True) if there),
            np.flatnonzero(group_N == number),
        )
        for number, mask in enumerate(patterns)
    ]
