"""The entries of a party's columns, that is, their possible splits in a fixed order, and the sums
for these.

An entry is a set of codes of one column. An entry of a numeric column is a prefix of its bins. If
values are missing, each prefix has two entries, with the missing values on the right and on the
left. An entry of a categorical column is a single category. The active party combines categories
into sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.sums import BELOW, BELOW_AND_LAST, SINGLE, SumPlan
from vfl_party.methods.secureboost.columns import Column


@dataclass(frozen=True)
class SplitEntry:
    """An entry: the codes of ``column`` (an index) that are less than ``below``, and with
    ``missing`` also the code for missing values.

    In a categorical column, ``below`` is the code of the category.
    """

    column: int
    below: int
    missing: bool = False


@dataclass(frozen=True)
class Layout:
    """The entries of a round's columns: the numeric entries ``numbers``, then one tuple of ``sets``
    for each categorical column.
    """

    numbers: tuple[SplitEntry, ...]
    sets: tuple[tuple[SplitEntry, ...], ...]

    @classmethod
    def of(cls, columns: list[Column], chosen: list[int]) -> Layout:
        """Returns the entries of the ``chosen`` columns. A categorical column that is not chosen
        has an empty set.
        """
        numbers: list[SplitEntry] = []
        sets: list[tuple[SplitEntry, ...]] = []
        for place, column in enumerate(columns):
            if column.cuts is None:
                is_used = place in chosen and column.size > 1
                sets.append(
                    tuple(SplitEntry(place, code) for code in range(column.size)) if is_used else ()
                )
            elif place in chosen:
                bins = len(column.cuts) + 1
                numbers += [SplitEntry(place, below) for below in range(1, bins)]
                if column.missing:
                    numbers += [SplitEntry(place, below, missing=True) for below in range(1, bins)]
                    numbers.append(SplitEntry(place, bins))
        return cls(tuple(numbers), tuple(sets))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of numeric entries, then the number of entries in each set."""
        return len(self.numbers), *map(len, self.sets)

    @property
    def entries(self) -> list[SplitEntry]:
        """All entries, in order."""
        return [*self.numbers, *(entry for entries in self.sets for entry in entries)]

    def choose_left(
        self, columns: list[Column], flags: npt.NDArray[np.bool_]
    ) -> tuple[int, list[bool]]:
        """Returns the column of a split, and whether each of its codes goes left.

        ``flags``: whether each entry is chosen, in order. The first chosen numeric entry is used
        or, without one, the chosen entries of the first categorical column that has any. Raises
        ValueError if no entry is chosen.
        """
        numbers = len(self.numbers)
        for place in np.flatnonzero(flags[:numbers])[:1].tolist():
            entry = self.numbers[place]
            size, cuts = columns[entry.column].size, columns[entry.column].cuts or ()
            return entry.column, [
                code < entry.below or (entry.missing and code > len(cuts)) for code in range(size)
            ]
        start = numbers
        for entries in self.sets:
            set_flags = flags[start : start + len(entries)]
            if set_flags.any():
                return entries[0].column, set_flags.tolist()
            start += len(entries)
        raise ValueError("no entry is chosen")


def plan_of(columns: list[Column], layout: Layout) -> SumPlan:
    """Returns the plan for the sums of a layout's entries."""
    rows = [
        (
            entry.column,
            BELOW_AND_LAST if entry.missing else BELOW,
            entry.below,
            columns[entry.column].size - 1,
        )
        for entry in layout.numbers
    ] + [
        (entry.column, SINGLE, entry.below, columns[entry.column].size - 1)
        for entries in layout.sets
        for entry in entries
    ]
    return SumPlan.of(np.array(rows, np.int32).reshape(-1, 4))
