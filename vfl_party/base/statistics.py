"""Computes the metrics of runs, reports and the leak meter, and their confidence intervals by
DeLong's method or a bootstrap. Needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
# The quantile of the normal distribution for a two-sided interval of this level.
Z = 1.959963984540054
# The number of bootstrap resamples, as Efron and Tibshirani (1993) advise for intervals.
RESAMPLES = 1_000
# The minimum probability in a log loss, so that the loss of a row is at most 34.54.
MIN_PROBABILITY = 1e-15
# The main metric of each kind of task.
MAIN_METRICS = {
    "binary": "auc",
    "multiclass": "accuracy",
    "multilabel": "auc",
    "regression": "rmse",
    "survival": "c_index",
    "ranking": "ndcg",
}
# The minimum number of rows of the smaller class for an interval. Intervals by the normal
# distribution cover too little in small samples (Obuchowski and Lieber 1998, Academic Radiology 5;
# Newcombe 2006, Statistics in Medicine 25). With an AUC of 0.84 and 500 rows, DeLong's 95 %
# interval contains it in 63 % of 1,500 draws with 2 positive rows, 78 % with 5, 88 % with 10 and
# 92 % with 30 (test_quality.py repeats this).
MIN_CLASS_ROWS = 10
# The number of rows of the smaller class below which reports warn of their intervals.
FEW_CLASS_ROWS = 30
# The number of pairs of rows that are compared at once.
_PAIRS = 1 << 20
# The seed of the bootstrap, so that the same rows give the same interval.
_SEED = 0


@dataclass(frozen=True)
class MetricInfluence:
    """A metric and the influence of each row on it.

    ``psi_N``: Terms, float64 [N], whose squares add up to the variance of ``value``. The
    differences of the terms of two metrics of the same rows give the variance of the metrics'
    difference.
    """

    value: float
    psi_N: Floats  # noqa: N815 - the shape is part of the name

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval by the normal distribution; NaN without a variance."""
        half = Z * float(np.sqrt((self.psi_N**2).sum()))
        half = half if np.isfinite(half) else float("nan")
        return self.value - half, self.value + half

    def minus(self, other: MetricInfluence) -> MetricInfluence:
        """Returns the difference of two metrics of the same rows."""
        known_N = np.isfinite(self.psi_N) & np.isfinite(other.psi_N)
        psi_N = np.full(len(known_N), np.inf)
        np.subtract(self.psi_N, other.psi_N, out=psi_N, where=known_N)
        return MetricInfluence(self.value - other.value, psi_N)


def auc(scores_N: npt.NDArray[np.floating], is_positive_N: npt.NDArray[np.bool_]) -> float:
    """Returns the area under the ROC curve. A pair of equal scores counts one half. NaN if there is
    only one class.

    Args:
        scores_N: The scores, [N]; higher scores for rows that are more likely positive.
        is_positive_N: Whether each row is positive, bool [N].
    """
    positives, negatives = int(is_positive_N.sum()), int((~is_positive_N).sum())
    if not positives or not negatives:
        return float("nan")
    wins = _compute_midranks(scores_N)[is_positive_N].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))


def compute_auc(scores_N: Floats, is_positive_N: npt.NDArray[np.bool_]) -> MetricInfluence:
    """Returns the area under a ROC curve, with DeLong's variance (DeLong, DeLong and Clarke-Pearson
    1988).

    Args:
        scores_N: The scores, [N]; higher scores for rows that are more likely positive.
        is_positive_N: Whether each row is positive, bool [N]; both classes must occur.

    The placements are computed from midranks in n log n steps (Sun and Xu 2014). If a class has
    fewer than ``MIN_CLASS_ROWS`` rows, the variance is infinite.
    """
    m, n = int(is_positive_N.sum()), int((~is_positive_N).sum())
    ranks_N = _compute_midranks(scores_N)
    over_M = (ranks_N[is_positive_N] - _compute_midranks(scores_N[is_positive_N])) / n
    under_N = 1 - (ranks_N[~is_positive_N] - _compute_midranks(scores_N[~is_positive_N])) / m
    value, psi_N = float(over_M.mean()), np.empty(len(scores_N))
    psi_N[is_positive_N] = _scale_placements(over_M)
    psi_N[~is_positive_N] = _scale_placements(under_N)
    return MetricInfluence(value, psi_N)


def describe_few_rows(positives: int, rows: int) -> str:
    """Returns sentences about too few rows of the smaller class for an interval, or for a reliable
    one; '' if there are enough.
    """
    count, name = min((positives, "positive"), (rows - positives, "negative"))
    if count >= FEW_CLASS_ROWS:
        return ""
    effect = (
        f"fewer than {MIN_CLASS_ROWS}, there is no valid interval and no verdict"
        if count < MIN_CLASS_ROWS
        else f"fewer than {FEW_CLASS_ROWS}, intervals are often too narrow"
    )
    return f"Only {count:,} of {rows:,} rows {'is' if count == 1 else 'are'} {name}. With {effect}."


def _compute_midranks(values_N: npt.NDArray[np.floating]) -> Floats:
    """Returns the ranks of values, from 1, [N]. Equal values get their mean rank. All ranks are NaN
    if a value is NaN.
    """
    if np.isnan(values_N).any():
        return np.full(len(values_N), np.nan)
    _, group_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[group_N])


def _scale_placements(placements: Floats) -> Floats:
    """Returns terms, [M], whose squares add up to the variance of the mean of ``placements``."""
    count = len(placements)
    if count < MIN_CLASS_ROWS:
        return np.full(count, np.inf)
    return np.asarray((placements - placements.mean()) / np.sqrt(count * (count - 1)))


def compute_mean(spreads: list[MetricInfluence]) -> MetricInfluence:
    """Returns the mean of several metrics of the same rows."""
    value = float(np.mean([spread.value for spread in spreads]))
    return MetricInfluence(value, np.mean([spread.psi_N for spread in spreads], axis=0))


def compute_c_index(times_N: Floats, events_N: Floats, risks_N: Floats) -> MetricInfluence | None:
    """Returns Harrell's concordance index, with the variance of a ratio of two U-statistics. None
    if no two rows can be compared.

    Args:
        times_N: The time of the event or of censoring of each row, [N].
        events_N: 1 if the event happened, 0 if the row was censored, [N].
        risks_N: The predicted risks, [N]; a higher risk means an earlier event.
    """
    # At equal times, a censored row was still at risk when the event of another row happened.
    order = np.lexsort((-events_N, times_N))
    risk_N, ended_N = risks_N[order], events_N[order] == 1
    steps_N = np.append(np.diff(times_N[order]) > 0, True)
    # Rows can be compared with all rows after the last row with an event at the same time.
    last_N = np.flatnonzero(steps_N | np.append(ended_N[:-1] & ~ended_N[1:], True)) + 1
    ends = np.flatnonzero(ended_N)
    starts = last_N[np.searchsorted(last_N, ends, side="right")]
    count = len(times_N)
    concordant_N, pairs_N = np.zeros(count), np.zeros(count)
    pairs_N[ends] = count - starts
    step = max(1, _PAIRS // max(1, count))
    for start in range(0, len(ends), step):
        rows, start_R = ends[start : start + step], starts[start : start + step]
        first_row = start_R[0]
        risk_R1, later = risk_N[rows, None], risk_N[first_row:]
        wins = (later < risk_R1) + 0.5 * (later == risk_R1)
        wins *= np.arange(first_row, count) >= start_R[:, None]
        concordant_N[rows] += wins.sum(axis=1)
        concordant_N[first_row:] += wins.sum(axis=0)
    pairs_N += np.cumsum(np.bincount(starts, minlength=count + 1))[:count]
    pairs = pairs_N.sum()
    if not pairs:
        return None
    value = float(concordant_N.sum() / pairs)
    psi_N = np.empty(count)
    psi_N[order] = 2 * (concordant_N - value * pairs_N) / pairs
    return MetricInfluence(value, psi_N)


def compute_log_losses(p_N: Floats) -> Floats:
    """Returns the log loss of each row, [N]. ``p_N``: The probability of its true class, [N]."""
    return np.asarray(-np.log(np.maximum(p_N, MIN_PROBABILITY)))


def ndcg(gains_N: Floats, scores_N: Floats, top: int | None = None) -> float:
    """Returns the NDCG of one query (Järvelin and Kekäläinen 2002). Rows with equal scores share
    their ranks.

    Args:
        gains_N: The relevance of each row, [N]; at least one must be greater than 0.
        scores_N: The scores, [N]; higher scores for more relevant rows.
        top: The number of ranks that count; None for all.
    """
    # Gives the same result as scikit-learn's ndcg_score, which takes a millisecond for each query.
    discounts = 1 / np.log2(np.arange(len(gains_N)) + 2)
    discounts[len(gains_N) if top is None else top :] = 0
    _, group_N, counts = np.unique(-scores_N, return_inverse=True, return_counts=True)
    mean_discounts = np.add.reduceat(discounts, np.cumsum(counts) - counts) / counts
    return float(mean_discounts[group_N] @ gains_N / (np.sort(gains_N)[::-1] @ discounts))


class ScoreRanking:
    """The ranking of rows of two classes by their scores, the highest score first.

    Args:
        y_N: The labels, [N]: 1 for positive rows, otherwise 0.
        scores_N: The scores, [N].
    """

    def __init__(self, y_N: Floats, scores_N: Floats) -> None:
        self._order_N = np.argsort(-scores_N, kind="stable")
        self._y_N = y_N[self._order_N]
        ordered_N = scores_N[self._order_N]
        # The position of the last row of each score.
        ends_N = np.append(np.diff(ordered_N) != 0, True)
        self._ends: Any = slice(None) if ends_N.all() else np.flatnonzero(ends_N)

    def average_precision_and_ks(self, times_N: Floats) -> tuple[float, float]:
        """Returns the average precision, and the Kolmogorov-Smirnov distance of the two classes'
        score distributions. Both are NaN if no row of a class is drawn.

        ``times_N``: How often each row is drawn, [N].
        """
        times_N = times_N[self._order_N]
        hits_E = np.cumsum(times_N * self._y_N)[self._ends]
        drawn_E = np.cumsum(times_N)[self._ends]
        positives, negatives = hits_E[-1], drawn_E[-1] - hits_E[-1]
        if not positives or not negatives:
            return float("nan"), float("nan")
        precision_E = hits_E / np.maximum(drawn_E, 1)
        precision = hits_E[0] * precision_E[0] + np.diff(hits_E) @ precision_E[1:]
        ks = np.abs(hits_E / positives - (drawn_E - hits_E) / negatives).max()
        return float(precision / positives), float(ks)


def resample(rows: int, compute: Callable[[Floats], Floats], resamples: int = RESAMPLES) -> Floats:
    """Returns T statistics of the original rows and of each bootstrap resample, [1 + R, T].

    Args:
        rows: The number of rows, N.
        compute: Computes T statistics from the number of times that each row is drawn, [N].
        resamples: The number of resamples, R.
    """
    random, values = np.random.default_rng(_SEED), [compute(np.ones(rows))]
    for _ in range(resamples):
        times_N = np.bincount(random.integers(0, rows, rows), minlength=rows)
        values.append(compute(times_N.astype(np.float64)))
    return np.stack(values)


def compute_interval(values_R: Floats) -> tuple[float, float]:
    """Returns the 95 % interval of resampled values, [R], without undefined values (NaN)."""
    finite_R = values_R[np.isfinite(values_R)]
    if not len(finite_R):
        return float("nan"), float("nan")
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(finite_R, (tail, 1 - tail)).tolist()
    return low, high
