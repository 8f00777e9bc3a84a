"""Computes intervals of metrics and of their differences: DeLong's, and bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
# The quantile of the normal distribution for that level.
Z = 1.959963984540054
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


def auc_spread(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> MetricInfluence:
    """Returns the area under a ROC curve, with DeLong's variance (DeLong, DeLong and Clarke-Pearson
    1988).

    Args:
        is_positive_N: the truth, [N], of both classes.
        scores_N: any numbers, [N]; a higher one means positive.

    The placements are computed from midranks in n log n steps (Sun and Xu 2014). With only one row
    of a class the variance is infinite.
    """
    from scipy.stats import rankdata

    m, n = int(is_positive_N.sum()), int((~is_positive_N).sum())
    positive_M, negative_N = scores_N[is_positive_N], scores_N[~is_positive_N]
    whole = rankdata(np.concatenate([positive_M, negative_N]))
    over_M = (whole[:m] - rankdata(positive_M)) / n
    under_N = 1 - (whole[m:] - rankdata(negative_N)) / m
    auc, psi_N = float(over_M.mean()), np.empty(len(scores_N))
    psi_N[is_positive_N] = _scale(over_M)
    psi_N[~is_positive_N] = _scale(under_N)
    return MetricInfluence(auc, psi_N)


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
    for row, start in zip(ends.tolist(), starts.tolist(), strict=True):
        later = risk_N[start:]
        won = (later < risk_N[row]).astype(np.float64)
        won += 0.5 * (later == risk_N[row])
        right_N[row] += won.sum()
        right_N[start:] += won
        pairs_N[row] += count - start
    pairs_N += np.cumsum(np.bincount(starts, minlength=count + 1))[:count]
    pairs = pairs_N.sum()
    if not pairs:
        return None
    value = float(right_N.sum() / pairs)
    psi_N = np.empty(count)
    psi_N[order] = 2 * (right_N - value * pairs_N) / pairs
    return MetricInfluence(value, psi_N)


def resample(rows: int, of: Callable[[Floats], Floats], resamples: int) -> Floats:
    """Returns the statistics of the rows themselves and of each resample, [1 + R, T].

    Args:
        rows: the number of rows, N.
        of: takes how often each row is drawn, [N], and returns T statistics.
        resamples: the number of resamples, R.
    """
    values = [of(np.ones(rows))]
    values += [of(times_N.astype(np.float64)) for times_N in _draws(rows, resamples)]
    return np.stack(values)


@lru_cache(maxsize=2)
def _draws(rows: int, resamples: int) -> npt.NDArray[np.uint16]:
    """Returns how often each row is drawn in each resample, [R, N]; cached for the same rows."""
    random = np.random.default_rng(_SEED)
    found_RN = np.empty((resamples, rows), np.uint16)
    for times_N in found_RN:
        times_N[:] = np.bincount(random.integers(0, rows, rows), minlength=rows)
    return found_RN


def percentiles(values_R: Floats) -> tuple[float, float]:
    """Returns the 95 % interval of resampled values, [R]; undefined ones (NaN) are left out."""
    finite_R = values_R[np.isfinite(values_R)]
    if not len(finite_R):
        return float("nan"), float("nan")
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(finite_R, (tail, 1 - tail)).tolist()
    return low, high
