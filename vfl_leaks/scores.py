"""Scores an attack's guesses over batches: AUC, matched accuracy and rank correlation, compared
with chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata

from vfl_leaks.scene import Figure, UnfitError
from vfl_party.base.seeds import derive_seed
from vfl_party.base.statistics import auc

Numbers = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int64]
QUANTILE = 0.95


def rank_correlation(scores_B: npt.NDArray[np.floating], number_B: Numbers) -> float:
    """Returns |Spearman's ρ|, because an attacker may invert its score; 0 if all scores are equal.

    Args:
        scores_B: the scores, [B].
        number_B: the labels, [B].
    """
    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (scores_B, number_B)]
    length = float(np.linalg.norm(ranks[0]) * np.linalg.norm(ranks[1]))
    return min(1.0, abs(float(ranks[0] @ ranks[1])) / length) if length else 0.0


def fold_auc(value: float) -> float:
    """Returns |AUC - 1/2| + 1/2, because an attacker may invert its score."""
    return abs(value - 0.5) + 0.5


def best_accuracy(guess_B: Classes, label_B: Classes, classes: int) -> float:
    """Returns the best accuracy over all assignments of groups to classes (Hungarian algorithm).

    Args:
        guess_B: the guessed group of each row, [B].
        label_B: the class of each row, [B].
        classes: the number of classes.
    """
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (guess_B, label_B), 1)
    groups, names = linear_sum_assignment(counts, maximize=True)
    return float(counts[groups, names].sum() / len(label_B))


@dataclass
class Tally:
    """Collects the score of an attack's guesses for each batch, and the score of the same guesses
    for shuffled labels (chance).
    """

    seed: int
    found: list[float] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)
    skipped: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(derive_seed(self.seed, "shuffled labels"))

    def binary(self, scores_B: npt.NDArray[np.floating], positive_B: npt.NDArray[np.bool_]) -> None:
        """Adds a batch of a binary task: the AUC of the scores. A batch of one class is skipped."""
        if positive_B.all() or not positive_B.any():
            self.skipped += 1
            return
        self.found.append(auc(scores_B, positive_B))
        self.chance.append(auc(scores_B, self._random.permutation(positive_B)))

    def groups(self, guess_B: Classes, label_B: Classes, classes: int) -> None:
        """Adds a batch of guessed groups that are not yet assigned to classes. A batch of one class
        is skipped.
        """
        if len(np.unique(label_B)) < 2:
            self.skipped += 1
            return
        self.found.append(best_accuracy(guess_B, label_B, classes))
        self.chance.append(best_accuracy(guess_B, self._random.permutation(label_B), classes))

    def named(self, guess_B: Classes, label_B: Classes) -> None:
        """Adds a batch of guessed classes. A batch of one class is skipped."""
        if len(np.unique(label_B)) < 2:
            self.skipped += 1
            return
        self.found.append(float((guess_B == label_B).mean()))
        self.chance.append(float((guess_B == self._random.permutation(label_B)).mean()))

    def numbers(self, scores_B: npt.NDArray[np.floating], number_B: Numbers) -> None:
        """Adds a batch of a regression: |Spearman's ρ| of the scores. A batch of equal labels is
        skipped.
        """
        if len(np.unique(number_B)) < 2:
            self.skipped += 1
            return
        self.found.append(rank_correlation(scores_B, number_B))
        self.chance.append(rank_correlation(scores_B, self._random.permutation(number_B)))

    def figure(self, knows: str, unit: str) -> Figure:
        """Returns the median and the 95 % quantile over the batches. Each AUC is folded first (see
        ``fold_auc``).

        Raises UnfitError if there is no batch to judge.
        """
        few = "only equal labels" if unit == "|ρ|" else "too few rows of a class"
        if not self.found:
            raise UnfitError(f"no batch can be judged (batches with {few}: {self.skipped})")
        fold = unit == "AUC"
        value, high = median_and_high([fold_auc(score) if fold else score for score in self.found])
        chance, chance_high = median_and_high(
            [fold_auc(score) if fold else score for score in self.chance]
        )
        judged, total = len(self.found), len(self.found) + self.skipped
        note = (
            f"{judged:,} of {total:,} batches are judged; the others have {few} (known: {knows})"
            if self.skipped
            else ""
        )
        return Figure(
            "labels",
            knows,
            unit,
            value,
            high,
            chance,
            chance_high,
            {},
            judged,
            self.skipped,
            note=note,
        )


def median_and_high(values: Sequence[float]) -> tuple[float, float]:
    """Returns the median and the 95 % quantile."""
    return float(np.median(values)), float(np.quantile(values, QUANTILE))
