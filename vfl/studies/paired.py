"""Compares two methods run by run: the runs of a pair have the same seed, and so the same test
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Literal

from vfl_common.config.recipe import Recipe

Verdict = Literal["better", "worse", "no difference shown", "too few pairs"]
# The minimum number of pairs: fewer do not show how much a difference varies.
MIN_PAIRS = 3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of ``first - second`` of a metric over ``pairs`` of runs, in the metric's unit.

    ``low``, ``high``: the interval of 95 % confidence; None with fewer than three pairs.
    ``p``: the probability of a mean at least as far from 0 if the methods are equal; corrected for
    ``comparisons``, if there are several (see ``holm``). ``verdict``: on the first method;
    ``better`` or ``worse`` if ``p`` is below 0.05: of a single comparison, if 0 lies outside the
    interval.
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

    The interval is ``mean ± t * sd * sqrt(1 / n + overlap)``: ``n`` pairs, ``sd`` the sample
    standard deviation of their differences, ``t`` the 0.975 quantile of Student's distribution with
    ``n - 1`` degrees of freedom. With ``overlap = 0`` that is the paired t interval. Runs that
    learn from overlapping rows vary less among each other than with new data; the
    overlap corrects for that (Nadeau and Bengio, "Inference for the Generalization Error", Machine
    Learning 52, 2003, section 3; for repeated cross-validation: Bouckaert and Frank, PAKDD 2004).

    Args:
        metric: its name, such as ``auc``.
        first: values of the metric, one for each run.
        second: the values of the other method, in the same order.
        overlap: the evaluated rows for each row that was learned from. 0 if all runs have the same
            evaluated rows: the interval is then about these rows.
        lower_is_better: whether lower values of the metric are better.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    middle, n = mean(differences), len(differences)
    if n < MIN_PAIRS:
        return Difference(metric, n, middle, None, None, "too few pairs")
    # scipy.special loads faster than scipy.stats.
    from scipy.special import stdtr, stdtrit

    error = stdev(differences) * math.sqrt(1 / n + overlap)
    half = float(stdtrit(n - 1, 0.5 + _CONFIDENCE / 2)) * error
    low, high = middle - half, middle + half
    # Without any variation, the difference is certain.
    p = 2 * float(stdtr(n - 1, -abs(middle) / error)) if error else float(middle == 0)
    verdict: Verdict = "no difference shown"
    if low > 0 or high < 0:
        verdict = "worse" if (middle < 0) != lower_is_better else "better"
    return Difference(metric, n, middle, low, high, verdict, p)


def holm(comparisons: Sequence[Difference]) -> list[Difference]:
    """Corrects the verdicts of several comparisons, so that the probability of any false
    difference is at most 5 % (Holm, "A simple sequentially rejective multiple
    test procedure", Scandinavian Journal of Statistics 6, 1979).

    Of m comparisons, the one with the k-th smallest ``p`` gets (m - k + 1) · p, at least that of
    those before it, and at most 1. The intervals are unchanged. Comparisons with too few pairs are
    unchanged, and do not count.
    """
    order = sorted(
        (at for at, comparison in enumerate(comparisons) if comparison.p is not None),
        key=lambda at: comparisons[at].p or 0,
    )
    corrected, p, m = list(comparisons), 0.0, len(order)
    for k, at in enumerate(order):
        comparison = comparisons[at]
        p = max(p, min(1.0, (m - k) * (comparison.p or 0.0)))
        verdict = comparison.verdict if p < 1 - _CONFIDENCE else "no difference shown"
        corrected[at] = replace(comparison, p=p, comparisons=m, verdict=verdict)
    return corrected


def overlap_of(recipe: Recipe, split: str) -> float:
    """Returns the number of rows of ``split`` (``test`` or ``validation``) for each row that was
    learned from; 0 if the data determine the splits.

    For test rows, validation rows count as learned from: they determine when to stop.
    """
    rows = recipe.rows
    if rows.split == "column":
        return 0.0
    if split == "validation":
        return rows.validation / (1 - rows.share_for_tests - rows.validation)
    return rows.share_for_tests / (1 - rows.share_for_tests)
