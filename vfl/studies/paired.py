"""Compares two methods run by run: the runs of a pair have the same seed, and so the same test
rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

from vfl_common.config.recipe import Recipe

Verdict = Literal["better", "worse", "no difference shown", "too few pairs"]
# Fewer say nothing about how much a difference varies.
LEAST = 3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of ``first - second`` of a metric over ``pairs`` of runs, in the metric's unit.

    ``low``, ``high``: the interval of 95 % confidence; None with fewer than three pairs.
    ``verdict``: of the first; ``better`` or ``worse`` if 0 lies outside the interval.
    """

    metric: str
    pairs: int
    mean: float
    low: float | None
    high: float | None
    verdict: Verdict

    def __str__(self) -> str:
        text = f"{self.verdict}: {self.metric} {self.mean:+.4g}"
        if self.low is None:
            return f"{text} with {self.pairs} pair{'s' if self.pairs != 1 else ''} of runs"
        return f"{text} ({self.low:+.4g} to {self.high:+.4g}, 95 %) with {self.pairs} pairs of runs"


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
    learn from overlapping rows vary less among each other than new data would make them; the
    overlap corrects for that (Nadeau and Bengio, "Inference for the Generalization Error", Machine
    Learning 52, 2003, section 3; for repeated cross-validation: Bouckaert and Frank, PAKDD 2004).

    Args:
        metric: its name, such as ``auc``.
        first: values of the metric, one for each run.
        second: the values of the other method, in the same order.
        overlap: the evaluated rows for each row that was learned from. 0 if all runs have the same
            evaluated rows: the interval is then about these rows.
        lower_is_better: of the metric.
    """
    each = [a - b for a, b in zip(first, second, strict=True)]
    middle, n = mean(each), len(each)
    if n < LEAST:
        return Difference(metric, n, middle, None, None, "too few pairs")
    # Of scipy.special, which loads faster than scipy.stats.
    from scipy.special import stdtrit

    t = float(stdtrit(n - 1, 0.5 + _CONFIDENCE / 2))
    half = t * stdev(each) * math.sqrt(1 / n + overlap)
    low, high = middle - half, middle + half
    verdict: Verdict = "no difference shown"
    if low > 0 or high < 0:
        verdict = "worse" if (middle < 0) != lower_is_better else "better"
    return Difference(metric, n, middle, low, high, verdict)


def overlap_of(recipe: Recipe, split: str) -> float:
    """Returns the rows of ``split`` (``test`` or ``validation``) for each row that was learned
    from; 0 if the data say which rows these are.

    Validation rows count as learned from when test rows are evaluated: they decide when to stop.
    """
    rows = recipe.rows
    if rows.split == "column":
        return 0.0
    if split == "validation":
        return rows.validation / (1 - rows.share_for_tests - rows.validation)
    return rows.share_for_tests / (1 - rows.share_for_tests)
