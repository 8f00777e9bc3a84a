"""Converts a party's columns to small integer codes for trees: one code for each cell, learned from
the training rows.

An entry is a possible split of a column: a set of its codes. Entries are in a fixed order. An entry
of a numeric column is a prefix of its bins. If values are missing, each prefix has two entries,
with the missing values on the right and on the left. An entry of a categorical column is a single
category. The active party combines categories into sets. A party declares the number of its entries
before the first gradients are sent, which limits the entries of each tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.homomorphic import Integers
from vfl_party.homomorphic.sums import BELOW, BELOW_AND_LAST, SINGLE, SumPlan
from vfl_party.methods.secureboost.settings import (
    FACTS,
    MAX_CODES,
    MAX_ENTRIES,
    SecureBoostSettings,
)
from vfl_party.phases.context import Party

# The code of a cell whose value does not occur in training. At a split, it follows the majority of
# rows.
ELSEWHERE = -1
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Column:
    """Converts the cells of a column to codes.

    ``cuts``: the thresholds of a numeric column, where a number's code is the number of cuts below
    it; None for a categorical column. ``categories``: the preprocessing codes that occur in
    training, ascending, where a category's index is its code. ``missing``: whether numbers are
    missing in training; the last code then stands for a missing number.
    """

    name: str
    cuts: tuple[float, ...] | None = None
    missing: bool = False
    categories: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of codes."""
        return len(self.categories) if self.cuts is None else len(self.cuts) + 1 + self.missing

    def codes(self, cells_N: npt.NDArray[Any]) -> Codes:
        """Returns the code of each cell."""
        if self.cuts is None:
            known = np.array(self.categories, np.int64)
            places = np.searchsorted(known, cells_N).clip(max=len(known) - 1)
            return np.where(known[places] == cells_N, places, ELSEWHERE).astype(np.int8)
        bins = np.searchsorted(np.array(self.cuts), cells_N.astype(np.float64), side="left")
        missing = self.size - 1 if self.missing else ELSEWHERE
        return np.where(np.isnan(cells_N), missing, bins).astype(np.int8)


def cells(party: Party) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]:
    """Returns the party's numbers [N, F], with NaN for missing ones, the preprocessing codes of its
    categories [N, K], and all column names. Raises InputError without columns.
    """
    if party.rows.data.columns is None:
        raise InputError(
            Code.DATA_INVALID,
            f"{party.name}: has no features. Add a [data] table to the party file.",
        )
    return party.rows.data.columns()


def learn_columns(party: Party, bins: int, rows: Rows) -> list[Column]:
    """Learns the codes of the columns from ``rows``, numeric columns first.

    Raises InputError if a column has too many categories, or if all columns are constant.
    """
    numbers_NF, codes_NK, names = cells(party)
    width, columns = numbers_NF.shape[1], []
    for f in range(width):
        values = numbers_NF[rows, f].astype(np.float64)
        present = values[~np.isnan(values)]
        columns.append(
            Column(names[f], tuple(cuts(present, bins)), missing=0 < len(present) < len(values))
        )
    for k in range(codes_NK.shape[1]):
        categories = tuple(np.unique(codes_NK[rows, k]).tolist())
        if len(categories) > MAX_CODES:
            raise InputError(
                Code.DATA_INVALID,
                f"{party.name}: column {names[width + k]!r} must have at most {MAX_CODES} "
                f"categories for trees (got {len(categories)}). Group some of them, or drop the "
                "column.",
            )
        columns.append(Column(names[width + k], categories=categories))
    if not any(column.size > 1 for column in columns):
        raise InputError(
            Code.DATA_INVALID,
            f"{party.name}: all columns are constant in the training rows, so trees cannot use "
            "them. Add other columns.",
        )
    return columns


def cuts(values: npt.NDArray[np.float64], bins: int) -> list[float]:
    """Returns at most ``bins`` - 1 cuts halfway between ``values`` [N], at quantiles if there are
    more different values than bins.
    """
    ordered = np.sort(values)
    distinct, first_places = np.unique(ordered, return_index=True)
    if len(distinct) > bins:
        # Quantiles are cut at these positions, or at the next different value.
        quantile_places = np.arange(1, bins) * len(ordered) // bins
        ends = np.unique(np.searchsorted(first_places, quantile_places, side="left"))
        ends = ends[(ends > 0) & (ends < len(distinct))]
    else:
        ends = np.arange(1, len(distinct))
    return ((distinct[ends - 1] + distinct[ends]) / 2).tolist() if len(distinct) else []


def encode_rows(party: Party, columns: list[Column]) -> Codes:
    """Returns the codes of all rows, [N, columns]."""
    numbers_NF, codes_NK, _ = cells(party)
    return encode_cells(columns, numbers_NF, codes_NK)


def encode_cells(
    columns: list[Column], numbers_NF: npt.NDArray[np.float32], codes_NK: npt.NDArray[np.int64]
) -> Codes:
    """Returns the codes [N, columns] of rows with these numbers and categories."""
    columns_of_cells = [*numbers_NF.T, *codes_NK.T]
    return np.stack(
        [column.codes(cells_N) for column, cells_N in zip(columns, columns_of_cells, strict=True)],
        axis=1,
    )


def sample_columns(
    seed: int, phase: str, party: str, round_: int, count: int, share: float
) -> list[int]:
    """Draws the columns that a round's trees use, ascending; at least one."""
    if share == 1.0:
        return list(range(count))
    order = draw_permutation(derive_seed(seed, phase, "columns", party, round_), count)
    return sorted(order[: max(1, round(share * count))].tolist())


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


@dataclass(frozen=True)
class Offer:
    """The number of numeric columns, the number of all their possible splits, and the number of
    categorical columns that have 0, 1, … entries.

    The offer discloses neither the order of columns nor the number of splits of a single numeric
    column.
    """

    numbers: int
    splits: int
    sets: tuple[int, ...]

    @classmethod
    def of(cls, columns: list[Column]) -> Offer:
        """Returns the offer of all columns together."""
        splits, *sets = Layout.of(columns, list(range(len(columns)))).sizes
        return cls(
            len(columns) - len(sets),
            splits,
            tuple(np.bincount(sets, minlength=MAX_CODES + 1).tolist()),
        )

    def facts(self) -> list[int]:
        """Returns the offer as a list of numbers for the wire."""
        return [self.numbers, self.splits, *self.sets]

    @classmethod
    def read(cls, facts: list[int], settings: SecureBoostSettings) -> Offer | None:
        """Returns the offer that a peer has declared; None if no columns can have these numbers."""
        numbers, splits, *sets = facts
        impossible = (
            min(facts) < 0 or len(facts) != FACTS or sets[1] or numbers + sum(sets) > MAX_ENTRIES
        )
        if impossible or splits > numbers * (2 * settings.bins - 1) or numbers + sum(sets) < 1:
            return None
        return cls(numbers, splits, tuple(sets))

    @property
    def columns(self) -> int:
        """The number of categorical columns."""
        return sum(self.sets)

    def allows(self, sizes: Integers, settings: SecureBoostSettings) -> bool:
        """Whether a tree may have entries of these ``sizes``: the number of numeric entries, then
        the number of entries of each categorical column.

        A tree uses the entries of all columns, unless ``column_sample`` draws some columns.
        """
        sets = sizes[1:]
        if min(sizes) < 0 or max(sets, default=0) > MAX_CODES or sum(sizes.tolist()) > MAX_ENTRIES:
            return False
        counts = np.bincount(sets, minlength=MAX_CODES + 1)
        if settings.column_sample == 1.0:
            return bool(sizes[0] == self.splits and (counts == self.sets).all())
        num_drawn = max(1, round(settings.column_sample * (self.numbers + self.columns)))
        is_possible = (
            sizes[0] <= min(self.splits, num_drawn * (2 * settings.bins - 1))
            and (sets > 0).sum() <= num_drawn
        )
        return bool(is_possible and (counts[1:] <= np.array(self.sets[1:])).all())

    def __str__(self) -> str:
        sets = f", and {self.columns:,} categorical columns" if self.columns else ""
        return f"{self.splits:,} splits of {self.numbers:,} numeric columns{sets}"
