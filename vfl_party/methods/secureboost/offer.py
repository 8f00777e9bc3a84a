"""The number of possible splits of a party's columns, which the party declares before the first
gradients are sent. The declaration limits the entries of each tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vfl_party.homomorphic import Integers
from vfl_party.methods.secureboost.columns import Column
from vfl_party.methods.secureboost.exchanges import FACTS, MAX_ENTRIES
from vfl_party.methods.secureboost.settings import MAX_CODES, SecureBoostSettings
from vfl_party.methods.secureboost.tree.entries import Layout


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
