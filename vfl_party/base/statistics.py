"""Computes the metrics that runs, reports and the leak meter share, and their intervals (DeLong's,
and those of a bootstrap), with numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
# The quantile of the normal distribution for that level.
Z = 1.959963984540054
# The number of bootstrap resamples, as Efron and Tibshirani (1993) advise for intervals.
RESAMPLES = 1_000
# A probability below it counts as this in a log loss, which is therefore at most 34.54 for a row.
MIN_PROBABILITY = 1e-15
# The deciding metric by kind of task.
FIRST = {
    "binary": "auc",
    "multiclass": "accuracy",
    "multilabel": "auc",
    "regression": "rmse",
    "survival": "c_index",
    "ranking": "ndcg",
}
# The number of pairs of rows that are compared at once.
_PAIRS = 1 << 20
# The seed of the bootstrap, so that the same rows give the same interval.
_SEED = 0


@dataclass(frozen=True)
class MetricInfluence:
    """A metric and the influence of each row on it.

    ``psi_N``: terms, [N], whose squares add up to the variance of ``value``. The variance of the
    difference of two metrics of the same rows follows from the differences of their terms.
    """

    value: float
    psi_N: Floats  # noqa: N815 - the shape is part of the name

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval, by the normal distribution."""
        half = Z * float(np.sqrt((self.psi_N**2).sum()))
        return self.value - half, self.value + half

    def minus(self, other: MetricInfluence) -> MetricInfluence:
        """Returns the difference of two metrics of the same rows."""
        known_N = np.isfinite(self.psi_N) & np.isfinite(other.psi_N)
        psi_N = np.full(len(known_N), np.inf)
        np.subtract(self.psi_N, other.psi_N, out=psi_N, where=known_N)
        return MetricInfluence(self.value - other.value, psi_N)


def auc(scores_N: npt.NDArray[np.floating], is_positive_N: npt.NDArray[np.bool_]) -> float:
    """Returns the area under the ROC curve; equal scores count one half. NaN for only one class.

    Args:
        scores_N: any numbers, [N]; a higher one means positive.
        is_positive_N: whether each row is positive, [N].
    """
    positives, negatives = int(is_positive_N.sum()), int((~is_positive_N).sum())
    if not positives or not negatives:
        return float("nan")
    above = _midranks(scores_N)[is_positive_N].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def auc_spread(scores_N: Floats, is_positive_N: npt.NDArray[np.bool_]) -> MetricInfluence:
    """Returns the area under a ROC curve, with DeLong's variance (DeLong, DeLong and Clarke-Pearson
    1988).

    Args:
        scores_N: any numbers, [N]; a higher one means positive.
        is_positive_N: the truth, [N], of both classes.

    The placements are computed from midranks in n log n steps (Sun and Xu 2014). With only one row
    of a class the variance is infinite.
    """
    m, n = int(is_positive_N.sum()), int((~is_positive_N).sum())
    ranks_N = _midranks(scores_N)
    over_M = (ranks_N[is_positive_N] - _midranks(scores_N[is_positive_N])) / n
    under_N = 1 - (ranks_N[~is_positive_N] - _midranks(scores_N[~is_positive_N])) / m
    value, psi_N = float(over_M.mean()), np.empty(len(scores_N))
    psi_N[is_positive_N] = _scale(over_M)
    psi_N[~is_positive_N] = _scale(under_N)
    return MetricInfluence(value, psi_N)


def _midranks(values_N: npt.NDArray[np.floating]) -> Floats:
    """Returns ranks from 1, [N], of which equal values share the mean; NaN if a value is NaN."""
    if np.isnan(values_N).any():
        return np.full(len(values_N), np.nan)
    _, at_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[at_N])


def _scale(placements: Floats) -> Floats:
    """Returns terms whose squares add up to the variance of the mean."""
    count = len(placements)
    if count == 1:
        return np.full(1, np.inf)
    return np.asarray((placements - placements.mean()) / np.sqrt(count * (count - 1)))


def mean_spread(spreads: list[MetricInfluence]) -> MetricInfluence:
    """Returns the mean of several metrics of the same rows."""
    value = float(np.mean([one.value for one in spreads]))
    return MetricInfluence(value, np.mean([one.psi_N for one in spreads], axis=0))


def c_index_spread(times_N: Floats, events_N: Floats, risks_N: Floats) -> MetricInfluence | None:
    """Returns Harrell's C, with the variance of a ratio of two U-statistics; None if no two rows
    can be compared.

    Args:
        times_N: the time at which each row ended, [N].
        events_N: 1 if the row ended by the event, 0 if it was censored, [N].
        risks_N: any numbers, [N]; a higher one means an earlier event.
    """
    # At equal times, a censored row was still at risk when the others ended.
    order = np.lexsort((-events_N, times_N))
    risk_N, ended_N = risks_N[order], events_N[order] == 1
    steps_N = np.append(np.diff(times_N[order]) > 0, True)
    # The first row that is later than an ended row: after the last row that ended at that time.
    last_N = np.flatnonzero(steps_N | np.append(ended_N[:-1] & ~ended_N[1:], True)) + 1
    ends = np.flatnonzero(ended_N)
    starts = last_N[np.searchsorted(last_N, ends, side="right")]
    count = len(times_N)
    right_N, pairs_N = np.zeros(count), np.zeros(count)
    pairs_N[ends] = count - starts
    step = max(1, _PAIRS // max(1, count))
    for at in range(0, len(ends), step):
        rows, start_R = ends[at : at + step], starts[at : at + step]
        first = start_R[0]
        own_R1, later = risk_N[rows, None], risk_N[first:]
        won = (later < own_R1) + 0.5 * (later == own_R1)
        won *= np.arange(first, count) >= start_R[:, None]
        right_N[rows] += won.sum(axis=1)
        right_N[first:] += won.sum(axis=0)
    pairs_N += np.cumsum(np.bincount(starts, minlength=count + 1))[:count]
    pairs = pairs_N.sum()
    if not pairs:
        return None
    value = float(right_N.sum() / pairs)
    psi_N = np.empty(count)
    psi_N[order] = 2 * (right_N - value * pairs_N) / pairs
    return MetricInfluence(value, psi_N)


def log_losses(p_N: Floats) -> Floats:
    """Returns the log loss of each row, [N]. ``p_N``: the probability of its true class, [N]."""
    return np.asarray(-np.log(np.maximum(p_N, MIN_PROBABILITY)))


def ndcg(gains_N: Floats, scores_N: Floats, top: int | None = None) -> float:
    """Returns NDCG of one query (Järvelin and Kekäläinen 2002); equal scores share their ranks.

    Args:
        gains_N: how relevant each row is, [N]; at least one is.
        scores_N: any numbers, [N]; a higher one means more relevant.
        top: the number of ranks that count; None: all.
    """
    # Equals scikit-learn's ndcg_score, which takes a millisecond for each query.
    discounts = 1 / np.log2(np.arange(len(gains_N)) + 2)
    discounts[len(gains_N) if top is None else top :] = 0
    _, at, counts = np.unique(-scores_N, return_inverse=True, return_counts=True)
    shared = np.add.reduceat(discounts, np.cumsum(counts) - counts) / counts
    return float(shared[at] @ gains_N / (np.sort(gains_N)[::-1] @ discounts))


class ScoreRanking:
    """Rows of two classes in the order of their scores, the highest first.

    Args:
        y_N: 1 for positive rows, otherwise 0, [N].
        scores_N: the scores, [N].
    """

    def __init__(self, y_N: Floats, scores_N: Floats) -> None:
        self._order_N = np.argsort(-scores_N, kind="stable")
        self._y_N = y_N[self._order_N]
        ordered_N = scores_N[self._order_N]
        # The position of the last row of each score.
        ends_N = np.append(np.diff(ordered_N) != 0, True)
        self._ends: Any = slice(None) if ends_N.all() else np.flatnonzero(ends_N)

    def average_precision_and_ks(self, times_N: Floats) -> tuple[float, float]:
        """Returns average precision, and the largest distance of the two classes' distributions of
        scores (KS); NaN if a class is not drawn.

        ``times_N``: how often each row is drawn, [N].
        """
        times_N = times_N[self._order_N]
        hits_E = np.cumsum(times_N * self._y_N)[self._ends]
        both_E = np.cumsum(times_N)[self._ends]
        hits, false = hits_E[-1], both_E[-1] - hits_E[-1]
        if not hits or not false:
            return float("nan"), float("nan")
        precision_E = hits_E / np.maximum(both_E, 1)
        precision = hits_E[0] * precision_E[0] + np.diff(hits_E) @ precision_E[1:]
        ks = np.abs(hits_E / hits - (both_E - hits_E) / false).max()
        return float(precision / hits), float(ks)


def resample(rows: int, of: Callable[[Floats], Floats], resamples: int = RESAMPLES) -> Floats:
    """Returns the statistics of the rows themselves and of each resample, [1 + R, T].

    Args:
        rows: the number of rows, N.
        of: takes how often each row is drawn, [N], and returns T statistics.
        resamples: the number of resamples, R.
    """
    random, values = np.random.default_rng(_SEED), [of(np.ones(rows))]
    for _ in range(resamples):
        times_N = np.bincount(random.integers(0, rows, rows), minlength=rows)
        values.append(of(times_N.astype(np.float64)))
    return np.stack(values)


def percentiles(values_R: Floats) -> tuple[float, float]:
    """Returns the 95 % interval of resampled values, [R]; undefined ones (NaN) are left out."""
    finite_R = values_R[np.isfinite(values_R)]
    if not len(finite_R):
        return float("nan"), float("nan")
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(finite_R, (tail, 1 - tail)).tolist()
    return low, high
