"""The splits that a party's columns offer, in one order: what is summed up for each, and what it means.

An entry is a set of codes of one column. A number's entry is a prefix of its bins, twice if some are missing: with
those on the right, and on the left. A category's entry is the category alone: the active party joins them into sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic import Adder
from vfl_party.homomorphic.scheme import Held
from vfl_party.methods.secureboost.columns import Codes, Column
from vfl_party.seeds import Rows


@dataclass(frozen=True)
class Entry:
    """``column``: its place among the party's columns. ``below``: the codes below this one; ``missing``: that one too.

    For a category ``below`` is its code.
    """

    column: int
    below: int
    missing: bool = False


@dataclass(frozen=True)
class Layout:
    """The entries of a round's columns: ``numbers``, then one list for each column of categories."""

    numbers: tuple[Entry, ...]
    sets: tuple[tuple[Entry, ...], ...]

    @classmethod
    def of(cls, columns: list[Column], chosen: list[int]) -> Layout:
        """Returns the entries of the ``chosen`` columns; a set for each column of categories, empty if not chosen."""
        numbers: list[Entry] = []
        sets: list[tuple[Entry, ...]] = []
        for place, column in enumerate(columns):
            if column.cuts is None:
                used = place in chosen and column.size > 1
                sets.append(tuple(Entry(place, code) for code in range(column.size)) if used else ())
            elif place in chosen:
                bins = len(column.cuts) + 1
                numbers += [Entry(place, below) for below in range(1, bins)]
                if column.missing:
                    numbers += [Entry(place, below, missing=True) for below in range(1, bins)]
                    numbers.append(Entry(place, bins))
        return cls(tuple(numbers), tuple(sets))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of entries of the numbers, then of each set."""
        return len(self.numbers), *map(len, self.sets)

    @property
    def entries(self) -> list[Entry]:
        """Returns all in order."""
        return [*self.numbers, *(entry for each in self.sets for entry in each)]

    def left(self, columns: list[Column], flags: npt.NDArray[np.bool_]) -> tuple[int, list[bool]]:
        """Returns the column of a split and for each of its codes whether it goes left.

        ``flags``: of the entries, in order: of numbers those with the best gain, of which the first counts; else those
        of sets, of which the first column counts. Raises ValueError if there is none.
        """
        numbers = len(self.numbers)
        for place in np.flatnonzero(flags[:numbers])[:1].tolist():
            entry = self.numbers[place]
            size, cuts = columns[entry.column].size, columns[entry.column].cuts or ()
            return entry.column, [code < entry.below or (entry.missing and code > len(cuts)) for code in range(size)]
        at = numbers
        for each in self.sets:
            own = flags[at : at + len(each)]
            if own.any():
                return each[0].column, own.tolist()
            at += len(each)
        raise ValueError("no entry is chosen")


def summed(adder: Adder, held: Held, rows: Rows, codes_NF: Codes, columns: list[Column], layout: Layout) -> Held:
    """Returns the sums over ``rows`` of each entry, in order; there is at least one.

    ``codes_NF``: of the rows that ``held`` has, all columns.
    """
    entries = layout.entries
    used = sorted({entry.column for entry in entries})
    place = {column: at for at, column in enumerate(used)}
    size, width = max(columns[column].size for column in used), len(used)
    buckets = adder.buckets(held, rows, codes_NF[:, used], size)  # by column, then by code

    def below(entry: Entry) -> int:
        return (entry.below - 1) * width + place[entry.column]

    parts, order = [], list[Entry]()
    if layout.numbers:
        prefixes = [adder.take(buckets, [column * size for column in range(width)])]
        for code in range(1, max(entry.below for entry in layout.numbers)):
            own = adder.take(buckets, [column * size + code for column in range(width)])
            prefixes.append(adder.add(prefixes[-1], own))
        running = adder.joined(prefixes)
        plain = [entry for entry in layout.numbers if not entry.missing]
        parts.append(adder.take(running, [below(entry) for entry in plain]))
        more = [entry for entry in layout.numbers if entry.missing]
        if more:
            ends = [place[entry.column] * size + columns[entry.column].size - 1 for entry in more]
            parts.append(adder.add(adder.take(running, [below(entry) for entry in more]), adder.take(buckets, ends)))
        order += plain + more
    single = [entry for each in layout.sets for entry in each]
    if single:
        parts.append(adder.take(buckets, [place[entry.column] * size + entry.below for entry in single]))
        order += single
    at = {entry: number for number, entry in enumerate(order)}
    return adder.take(adder.joined(parts), [at[entry] for entry in entries])
