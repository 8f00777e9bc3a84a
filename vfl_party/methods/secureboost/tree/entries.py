"""The splits that a party's columns offer, in one order: what is summed up for each, and what it
means.

An entry is a set of codes of one column. A number's entry is a prefix of its bins, twice if some
are missing: with those on the right, and on the left. A category's entry is the category alone: the
active party joins them into sets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.columns import Codes, Column
from vfl_party.homomorphic import Adder, bucket_sums
from vfl_party.homomorphic.scheme import Held


@dataclass(frozen=True)
class SplitEntry:
    """``column``: its place among the party's columns. ``below``: the codes below this one;
    ``missing``: that one too.

    For a category ``below`` is its code.
    """

    column: int
    below: int
    missing: bool = False


@dataclass(frozen=True)
class Layout:
    """The entries of a round's columns: ``numbers``, then one list for each column of
    categories.
    """

    numbers: tuple[SplitEntry, ...]
    sets: tuple[tuple[SplitEntry, ...], ...]

    @classmethod
    def of(cls, columns: list[Column], chosen: list[int]) -> Layout:
        """Returns the entries of the ``chosen`` columns; a set for each column of categories, empty
        if not chosen.
        """
        numbers: list[SplitEntry] = []
        sets: list[tuple[SplitEntry, ...]] = []
        for place, column in enumerate(columns):
            if column.cuts is None:
                used = place in chosen and column.size > 1
                sets.append(
                    tuple(SplitEntry(place, code) for code in range(column.size)) if used else ()
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
        """Returns the number of entries of the numbers, then of each set."""
        return len(self.numbers), *map(len, self.sets)

    @property
    def entries(self) -> list[SplitEntry]:
        """Returns all in order."""
        return [*self.numbers, *(entry for each in self.sets for entry in each)]

    def left(self, columns: list[Column], flags: npt.NDArray[np.bool_]) -> tuple[int, list[bool]]:
        """Returns the column of a split and for each of its codes whether it goes left.

        ``flags``: of the entries, in order: of numbers those with the best gain, of which the first
        counts; else those of sets, of which the first column counts. Raises ValueError if there is
        none.
        """
        numbers = len(self.numbers)
        for place in np.flatnonzero(flags[:numbers])[:1].tolist():
            entry = self.numbers[place]
            size, cuts = columns[entry.column].size, columns[entry.column].cuts or ()
            return entry.column, [
                code < entry.below or (entry.missing and code > len(cuts)) for code in range(size)
            ]
        at = numbers
        for each in self.sets:
            own = flags[at : at + len(each)]
            if own.any():
                return each[0].column, own.tolist()
            at += len(each)
        raise ValueError("no entry is chosen")


@dataclass(frozen=True)
class Plan:
    """How sums of buckets become sums of entries, for one layout: places, as ``Adder.take`` wants
    them.

    ``used``: the columns that have entries, with ``size`` buckets each. ``firsts``: for each code
    that a number's entry reaches, the buckets of all columns. ``plain``, ``missing``: places among
    the running sums; ``ends``: the buckets of missing cells. ``single``: the buckets of categories.
    ``order``: the places of the entries among all these.
    """

    used: tuple[int, ...]
    size: int
    firsts: tuple[list[int], ...]
    plain: list[int]
    missing: list[int]
    ends: list[int]
    single: list[int]
    order: list[int]

    @classmethod
    def of(cls, columns: list[Column], layout: Layout) -> Plan:
        """Returns the plan; without entries, an empty one."""
        entries = layout.entries
        used = sorted({entry.column for entry in entries})
        place = {column: at for at, column in enumerate(used)}
        size, width = max((columns[column].size for column in used), default=0), len(used)
        with_missing = [at for at, entry in enumerate(layout.numbers) if entry.missing]
        without = [at for at, entry in enumerate(layout.numbers) if not entry.missing]
        order = [*without, *with_missing, *range(len(layout.numbers), len(entries))]
        back = [0] * len(entries)
        for at, entry in enumerate(order):
            back[entry] = at

        def running(at: int) -> int:
            entry = layout.numbers[at]
            return (entry.below - 1) * width + place[entry.column]

        def bucket(column: int, code: int) -> int:
            return place[column] * size + code

        codes = max((entry.below for entry in layout.numbers), default=0)
        return cls(
            tuple(used),
            size,
            tuple([column * size + code for column in range(width)] for code in range(codes)),
            [running(at) for at in without],
            [running(at) for at in with_missing],
            [
                bucket(column, columns[column].size - 1)
                for column in (layout.numbers[at].column for at in with_missing)
            ],
            [bucket(entry.column, entry.below) for each in layout.sets for entry in each],
            back,
        )


def summed(adder: Adder, held: Held, rows: Rows, codes_NF: Codes, plan: Plan) -> Held:
    """Returns the sums over ``rows`` of each entry, in order; there is at least one.

    ``codes_NF``: of the rows that ``held`` has, all columns.
    """
    used_NF = codes_NF if len(plan.used) == codes_NF.shape[1] else codes_NF[:, list(plan.used)]
    # By column, then by code.
    buckets = bucket_sums(adder, held, rows, used_NF, plan.size)
    parts = []
    if plan.firsts:
        prefixes = [adder.take(buckets, plan.firsts[0])]
        for of_code in plan.firsts[1:]:
            prefixes.append(adder.add(prefixes[-1], adder.take(buckets, of_code)))
        running = adder.joined(prefixes)
        parts.append(adder.take(running, plan.plain))
        if plan.missing:
            parts.append(
                adder.add(adder.take(running, plan.missing), adder.take(buckets, plan.ends))
            )
    if plan.single:
        parts.append(adder.take(buckets, plan.single))
    return adder.take(adder.joined(parts), plan.order)
