"""Curves of kept predictions: ROC, precision and recall, calibration, gain and lift, decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl.report.quality.intervals import Z
from vfl.report.quality.kept import KeptRows

Floats = npt.NDArray[np.float64]
# Points of a curve in a picture: more do not show.
_MOST = 240
# Parts of the rows by score.
TENTHS = 10


@dataclass(frozen=True)
class Calibration:
    """Groups of rows with alike scores. ``said_B``: their mean score; ``true_B``: the share of
    positive ones, with Wilson's interval ``low_B``, ``high_B``; ``rows_B``: how many there are.
    """

    said_B: Floats  # noqa: N815 - the shape is part of the name
    true_B: Floats  # noqa: N815
    low_B: Floats  # noqa: N815
    high_B: Floats  # noqa: N815
    rows_B: npt.NDArray[np.int64]  # noqa: N815


@dataclass(frozen=True)
class Tenth:
    """A tenth of the rows, by score. ``hits``: positive ones. ``gain``: the share of all positive
    ones in this and higher tenths. ``lift``: the share of positive ones up to here, by that of all
    rows.
    """

    rows: int
    hits: int
    least: float
    gain: float
    lift: float

    @property
    def rate(self) -> float:
        return self.hits / self.rows if self.rows else float("nan")


@dataclass(frozen=True)
class Decisions:
    """What a threshold decides about rows of two classes."""

    threshold: float
    hits: int
    false: int
    missed: int
    left: int

    @property
    def rows(self) -> int:
        return self.hits + self.false + self.missed + self.left

    @property
    def chosen(self) -> int:
        return self.hits + self.false

    @property
    def precision(self) -> float:
        return self.hits / self.chosen if self.chosen else float("nan")

    @property
    def recall(self) -> float:
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else float("nan")

    @property
    def accuracy(self) -> float:
        return (self.hits + self.left) / self.rows

    @property
    def f1(self) -> float:
        whole = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / whole if whole else 0.0


def roc(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> tuple[Floats, Floats]:
    """Returns the shares of false and of true positives, from (0, 0) to (1, 1)."""
    from sklearn.metrics import roc_curve

    false_T, true_T, _ = roc_curve(is_positive_N, scores_N)
    return false_T, true_T


def precision_recall(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats
) -> tuple[Floats, Floats]:
    """Returns precision and recall, from the lowest threshold to the highest."""
    from sklearn.metrics import precision_recall_curve

    precision_T, recall_T, _ = precision_recall_curve(is_positive_N, scores_N)
    return precision_T, recall_T


def calibration(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats, groups: int = TENTHS
) -> Calibration:
    """Divides the rows into groups of the same size by score, and compares what was said with what
    is true.
    """
    from sklearn.calibration import calibration_curve

    true_B, said_B = calibration_curve(is_positive_N, scores_N, n_bins=groups, strategy="quantile")
    edges = np.percentile(scores_N, np.linspace(0, 1, groups + 1) * 100)
    counts = np.bincount(np.searchsorted(edges[1:-1], scores_N), minlength=groups)
    rows_B = counts[counts > 0]
    middle_B = (true_B + Z**2 / (2 * rows_B)) / (1 + Z**2 / rows_B)
    half_B = np.sqrt(true_B * (1 - true_B) / rows_B + Z**2 / (4 * rows_B**2))
    half_B = Z * half_B / (1 + Z**2 / rows_B)
    return Calibration(said_B, true_B, middle_B - half_B, middle_B + half_B, rows_B)


def tenths(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> list[Tenth]:
    """Divides the rows into tenths, the highest scores first."""
    order_N = np.argsort(-scores_N, kind="stable")
    all_hits, rows, found = int(is_positive_N.sum()), 0, []
    hits = 0
    for part in np.array_split(order_N, min(TENTHS, len(order_N))):
        own = int(is_positive_N[part].sum())
        rows, hits = rows + len(part), hits + own
        gain = hits / all_hits if all_hits else float("nan")
        lift = gain / (rows / len(order_N))
        found.append(Tenth(len(part), own, float(scores_N[part].min()), gain, lift))
    return found


def decisions(kept: KeptRows, threshold: float | None) -> Decisions:
    """Counts what a threshold decides; None: what the model has decided."""
    said_N = kept.scores_N > threshold if threshold is not None else kept.decided_N == 1
    true_N = kept.is_positive_N
    counts = (true_N & said_N, ~true_N & said_N, true_N & ~said_N, ~true_N & ~said_N)
    hits, false, missed, left = (int(each.sum()) for each in counts)
    return Decisions(0.5 if threshold is None else threshold, hits, false, missed, left)


def confusion(kept: KeptRows) -> npt.NDArray[np.int64]:
    """Counts rows by true class (first axis) and decided class, [C, C]."""
    count = len(kept.classes)
    assert kept.decided_N is not None  # noqa: S101 - of classes
    cells = np.bincount(kept.truth_N * count + kept.decided_N, minlength=count * count)
    return cells.reshape(count, count)


def thinned(*arrays: Floats) -> list[Floats]:
    """Returns as many points as a picture shows, the first and the last among them."""
    count = len(arrays[0])
    if count <= _MOST:
        return list(arrays)
    at = np.unique(np.linspace(0, count - 1, _MOST).round().astype(np.int64))
    return [each[at] for each in arrays]
