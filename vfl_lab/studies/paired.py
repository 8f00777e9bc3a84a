"""Compares two methods by pairs of runs. The runs of a pair have the same seed and test rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Literal

from vfl_common.config.recipe import Recipe

Verdict = Literal["better", "worse", "no difference shown", "too few pairs"]
# The minimum number of pairs. Fewer pairs cannot show how much a difference varies.
MIN_PAIRS = 3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The difference of a metric between two methods: the mean of ``first - second`` over pairs of
    runs.

    Args:
        metric: The name of the metric.
        pairs: The number of pairs of runs.
        mean: The mean difference, in the metric's unit.
        low: The lower end of the 95 % confidence interval; None with fewer than three pairs.
        high: The upper end of the interval; None with fewer than three pairs.
        verdict: Whether the first method is ``better`` or ``worse``, which needs ``p`` < 0.05. For
            a single comparison, this means that 0 is outside the interval.
        p: The p-value: the probability of a mean at least as far from 0 if the methods are equal.
            For several comparisons it is corrected (see ``holm``).
        comparisons: The number of comparisons that ``p`` is corrected for.
    """

    metric: str
    pairs: int
    mean: float
    low: float | None
    high: float | None
    verdict: Verdict
    p: float | None = None
    comparisons: int = 1

    def __str__(self) -> str:
        unit = "pair" if self.pairs == 1 else "pairs"
        mean_ = f"{self.verdict}: {self.metric} {self.mean:+.4g}"
        if self.low is None:
            return f"{mean_} with {self.pairs} {unit} of runs"
        interval = f"({self.low:+.4g} to {self.high:+.4g}, 95 %) with {self.pairs} pairs of runs"
        if self.comparisons == 1:
            return f"{mean_} {interval}"
        return (
            f"{mean_} {interval}; p = {self.p:.2g}, corrected for {self.comparisons} "
            "comparisons (Holm)"
        )


def difference(
    metric: str,
    first: Sequence[float],
    second: Sequence[float],
    *,
    overlap: float = 0.0,
    lower_is_better: bool = False,
) -> Difference:
    """Compares two methods by the differences of their pairs of runs.

    The interval is ``mean ± t * sd * sqrt(1 / n + overlap)``. Here ``n`` is the number of pairs,
    ``sd`` the sample standard deviation of their differences, and ``t`` the 0.975 quantile of
    Student's distribution with ``n - 1`` degrees of freedom. With ``overlap = 0`` this is the
    paired t interval. Runs that train on overlapping rows vary less than runs on new data, and
    ``overlap`` corrects for that (Nadeau and Bengio, "Inference for the Generalization Error",
    Machine Learning 52, 2003, section 3; for repeated cross-validation: Bouckaert and Frank, PAKDD
    2004).

    Args:
        metric: The name of the metric, such as ``auc``.
        first: The metric of the first method, one value for each run.
        second: The metric of the second method, in the same order of runs.
        overlap: The number of evaluated rows divided by the number of training rows. Use 0 if all
            runs have the same evaluated rows; the interval then applies to these rows only.
        lower_is_better: Whether lower values of the metric are better.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    middle, n = mean(differences), len(differences)
    if n < MIN_PAIRS:
        return Difference(metric, n, middle, None, None, "too few pairs")
    # scipy.special loads faster than scipy.stats.
    from scipy.special import stdtr, stdtrit

    error = stdev(differences) * math.sqrt(1 / n + overlap)
    half_width = float(stdtrit(n - 1, 0.5 + _CONFIDENCE / 2)) * error
    low, high = middle - half_width, middle + half_width
    # If all differences are equal, p is 0, or 1 for a difference of 0.
    p = 2 * float(stdtr(n - 1, -abs(middle) / error)) if error else float(middle == 0)
    verdict: Verdict = "no difference shown"
    if low > 0 or high < 0:
        verdict = "worse" if (middle < 0) != lower_is_better else "better"
    return Difference(metric, n, middle, low, high, verdict, p)


def holm(comparisons: Sequence[Difference]) -> list[Difference]:
    """Corrects the verdicts of several comparisons, so that the probability of reporting any
    difference that does not exist is at most 5 % (Holm, "A simple sequentially rejective multiple
    test procedure", Scandinavian Journal of Statistics 6, 1979).

    Of m comparisons, the comparison with the k-th smallest ``p`` gets (m - k + 1) · p, but at least
    the corrected p of the comparison before it, and at most 1. The intervals stay the same.
    Comparisons with too few pairs stay the same, and m does not count them.
    """
    order = sorted(
        (index for index, comparison in enumerate(comparisons) if comparison.p is not None),
        key=lambda index: comparisons[index].p or 0,
    )
    corrected, p, m = list(comparisons), 0.0, len(order)
    for k, index in enumerate(order):
        comparison = comparisons[index]
        p = max(p, min(1.0, (m - k) * (comparison.p or 0.0)))
        verdict = comparison.verdict if p < 1 - _CONFIDENCE else "no difference shown"
        corrected[index] = replace(comparison, p=p, comparisons=m, verdict=verdict)
    return corrected


def compute_overlap(recipe: Recipe, split: str) -> float:
    """Returns the number of rows of ``split`` (``test`` or ``validation``) divided by the number of
    training rows; 0 if a column of the data defines the splits.

    For ``test``, validation rows count as training rows, because they determine when to stop.
    """
    rows = recipe.rows
    if rows.split == "column":
        return 0.0
    if split == "validation":
        return rows.validation / (1 - rows.share_for_tests - rows.validation)
    return rows.share_for_tests / (1 - rows.share_for_tests)
