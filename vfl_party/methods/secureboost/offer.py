"""The splits that a party's columns can offer to trees, declared before the first gradients are
sent; this limits the entries of each tree.
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
    """The number of numeric columns and of all their splits, and the numbers of categorical columns
    with 0, 1, … entries.

    It discloses neither an order nor the number of splits of a single numeric column.
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
        """Returns the numbers for the wire."""
        return [self.numbers, self.splits, *self.sets]

    @classmethod
    def read(cls, facts: list[int], settings: SecureBoostSettings) -> Offer | None:
        """Returns the offer that a peer has declared; None if no columns have it."""
        numbers, splits, *sets = facts
        cannot = (
            min(facts) < 0 or len(facts) != FACTS or sets[1] or numbers + sum(sets) > MAX_ENTRIES
        )
        if cannot or splits > numbers * (2 * settings.bins - 1) or numbers + sum(sets) < 1:
            return None
        return cls(numbers, splits, tuple(sets))

    @property
    def columns(self) -> int:
        """Returns the number of columns of categories."""
        return sum(self.sets)

    def allows(self, sizes: Integers, settings: SecureBoostSettings) -> bool:
        """Whether a tree may have entries of these ``sizes``: of the numbers, then of each column
        of categories.

        All columns offer all they have, unless ``column_sample`` draws some.
        """
        sets = sizes[1:]
        if min(sizes) < 0 or max(sets, default=0) > MAX_CODES or sum(sizes.tolist()) > MAX_ENTRIES:
            return False
        counts = np.bincount(sets, minlength=MAX_CODES + 1)
        if settings.column_sample == 1.0:
            return bool(sizes[0] == self.splits and (counts == self.sets).all())
        drawn = max(1, round(settings.column_sample * (self.numbers + self.columns)))
        fits = (
            sizes[0] <= min(self.splits, drawn * (2 * settings.bins - 1))
            and (sets > 0).sum() <= drawn
        )
        return bool(fits and (counts[1:] <= np.array(self.sets[1:])).all())

    def __str__(self) -> str:
        sets = f", and {self.columns:,} columns of categories" if self.columns else ""
        return f"{self.splits:,} splits of {self.numbers:,} columns of numbers{sets}"
