"""Computes curves of stored predictions: ROC, precision and recall, calibration, gain and lift."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_lab.report.quality.kept import SplitPredictions
from vfl_party.base.statistics import Z

Floats = npt.NDArray[np.float64]
# Maximum number of points of a curve in a picture; more are not visible.
_MAX_POINTS = 240
# Number of groups of rows by score.
TENTHS = 10


@dataclass(frozen=True)
class Calibration:
    """The calibration of groups of rows with similar scores, [B] each.

    ``predicted_B``: the mean score; ``true_B``: the share of positive rows, with Wilson's interval
    ``low_B``, ``high_B``; ``rows_B``: the number of rows.
    """

    predicted_B: Floats  # noqa: N815 - the shape is part of the name
    true_B: Floats  # noqa: N815
    low_B: Floats  # noqa: N815
    high_B: Floats  # noqa: N815
    rows_B: npt.NDArray[np.int64]  # noqa: N815


@dataclass(frozen=True)
class Tenth:
    """A tenth of the rows by score.

    ``hits``: the number of positive rows. ``min_score``: the lowest score. ``gain``: the share of
    all positive rows in this and higher tenths. ``lift``: the share of positive rows in these
    tenths, divided by that in all rows.
    """

    rows: int
    hits: int
    min_score: float
    gain: float
    lift: float

    @property
    def rate(self) -> float:
        """The share of positive rows."""
        return self.hits / self.rows if self.rows else float("nan")


@dataclass(frozen=True)
class Decisions:
    """The decisions of a threshold on rows of two classes.

    ``hits``: true positives; ``false``: false positives; ``missed``: false negatives; ``left``:
    true negatives.
    """

    threshold: float
    hits: int
    false: int
    missed: int
    left: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.hits + self.false + self.missed + self.left

    @property
    def chosen(self) -> int:
        """The number of rows above the threshold."""
        return self.hits + self.false

    @property
    def precision(self) -> float:
        """The share of the chosen rows that are positive; NaN if none is chosen."""
        return self.hits / self.chosen if self.chosen else float("nan")

    @property
    def recall(self) -> float:
        """The share of the positive rows that are chosen; NaN without positive rows."""
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else float("nan")

    @property
    def accuracy(self) -> float:
        """The share of right decisions."""
        return (self.hits + self.left) / self.rows

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 if undefined."""
        whole = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / whole if whole else 0.0


def compute_roc(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> tuple[Floats, Floats]:
    """Returns the false and the true positive rates, [T] each, from (0, 0) to (1, 1).

    Args:
        is_positive_N: whether each row is positive, [N]; both classes occur.
        scores_N: the scores, [N].
    """
    from sklearn.metrics import roc_curve

    false_T, true_T, _ = roc_curve(is_positive_N, scores_N)
    return false_T, true_T


def compute_precision_recall(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats
) -> tuple[Floats, Floats]:
    """Returns precision and recall, [T] each, from the lowest threshold to the highest.

    Args:
        is_positive_N: whether each row is positive, [N]; both classes occur.
        scores_N: the scores, [N].
    """
    from sklearn.metrics import precision_recall_curve

    precision_T, recall_T, _ = precision_recall_curve(is_positive_N, scores_N)
    return precision_T, recall_T


def compute_calibration(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats, groups: int = TENTHS
) -> Calibration:
    """Divides the rows into groups of equal size by score, and compares scores with labels.

    Args:
        is_positive_N: whether each row is positive, [N].
        scores_N: the predicted probabilities, [N].
        groups: the number of groups.
    """
    from sklearn.calibration import calibration_curve

    true_B, predicted_B = calibration_curve(
        is_positive_N, scores_N, n_bins=groups, strategy="quantile"
    )
    edges = np.percentile(scores_N, np.linspace(0, 1, groups + 1) * 100)
    counts = np.bincount(np.searchsorted(edges[1:-1], scores_N), minlength=groups)
    rows_B = counts[counts > 0]
    middle_B = (true_B + Z**2 / (2 * rows_B)) / (1 + Z**2 / rows_B)
    half_B = np.sqrt(true_B * (1 - true_B) / rows_B + Z**2 / (4 * rows_B**2))
    half_B = Z * half_B / (1 + Z**2 / rows_B)
    return Calibration(predicted_B, true_B, middle_B - half_B, middle_B + half_B, rows_B)


def divide_into_tenths(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> list[Tenth]:
    """Divides the rows into tenths, the highest scores first.

    Args:
        is_positive_N: whether each row is positive, [N].
        scores_N: the scores, [N].
    """
    order_N = np.argsort(-scores_N, kind="stable")
    all_hits, rows, groups_ = int(is_positive_N.sum()), 0, []
    hits = 0
    for part in np.array_split(order_N, min(TENTHS, len(order_N))):
        own = int(is_positive_N[part].sum())
        rows, hits = rows + len(part), hits + own
        gain = hits / all_hits if all_hits else float("nan")
        lift = gain / (rows / len(order_N))
        groups_.append(Tenth(len(part), own, float(scores_N[part].min()), gain, lift))
    return groups_


def count_decisions(predictions: SplitPredictions, threshold: float | None) -> Decisions:
    """Counts the decisions of a threshold; None: those of the model."""
    decided_N = (
        predictions.scores_N > threshold if threshold is not None else predictions.decided_N == 1
    )
    true_N = predictions.is_positive_N
    counts = (true_N & decided_N, ~true_N & decided_N, true_N & ~decided_N, ~true_N & ~decided_N)
    hits, false, missed, left = (int(count.sum()) for count in counts)
    return Decisions(0.5 if threshold is None else threshold, hits, false, missed, left)


def count_confusions(predictions: SplitPredictions) -> npt.NDArray[np.int64]:
    """Counts rows by true class (first axis) and decided class, [C, C]."""
    count = len(predictions.classes)
    assert predictions.decided_N is not None  # noqa: S101 - of classes
    cells = np.bincount(
        predictions.truth_N * count + predictions.decided_N, minlength=count * count
    )
    return cells.reshape(count, count)


def thin_out(*arrays: Floats) -> list[Floats]:
    """Returns a subset of the points of a curve for a picture, with the first and the last.

    Args:
        arrays: coordinates of the points, [N] each.
    """
    count = len(arrays[0])
    if count <= _MAX_POINTS:
        return list(arrays)
    at = np.unique(np.linspace(0, count - 1, _MAX_POINTS).round().astype(np.int64))
    return [array[at] for array in arrays]
