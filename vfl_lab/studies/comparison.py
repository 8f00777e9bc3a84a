"""Tests whether each method of a study differs significantly from the first method."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from rich import box
from rich.table import Table

from vfl_common.config.recipe import Recipe
from vfl_common.files import write_atomic
from vfl_lab.studies.plan import Pipeline, StudyFile
from vfl_lab.studies.report import FineTuned, get_display_unit

Verdict = Literal["better", "worse", "no difference shown", "too few pairs"]


# The minimum number of pairs. Fewer pairs cannot show how much a difference varies.
MIN_PAIRS = 3


_CONFIDENCE = 0.95


# The runs of a pair have the same seed and test rows.
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


@dataclass(frozen=True)
class MethodDifference:
    """The difference of a method from the first method of the study, at one label count.

    ``against`` is the name of the first method.
    """

    study: str
    method: str
    against: str
    labels: int | None
    difference: Difference

    def row(self) -> dict[str, Any]:
        """Returns the comparison as a line of ``differences.csv``."""
        d = self.difference
        return {
            "study": self.study,
            "method": self.method,
            "against": self.against,
            "labels": "" if self.labels is None else self.labels,
            "metric": d.metric,
            "pairs": d.pairs,
            "difference": d.mean,
            "low": d.low,
            "high": d.high,
            "p": d.p,
            "comparisons": d.comparisons,
            "verdict": d.verdict,
        }


def compare_methods(
    study: StudyFile, chains: Sequence[Pipeline], results: Iterable[FineTuned]
) -> list[MethodDifference]:
    """Compares every method with the first method at each label count, over the seeds and folds
    that both methods have finished. The verdicts are corrected for the number of comparisons
    (``holm``).

    A method is left out if it has fewer than three pairs of runs, or different test rows.
    """
    recipes = {run.method: run.recipe for chain in chains for run in chain.finetune}
    values = {
        (result.method, result.labels, result.seed, result.fold): result.value(study.metric)
        for result in results
    }
    first, rows = study.methods[0].name, []
    for method in study.in_groups:
        if method.name == first or _get_test_settings(recipes[method.name]) != _get_test_settings(
            recipes[first]
        ):
            continue
        for labels in study.labels or (None,):
            pairs = [
                (value, values[first, labels, seed, fold])
                for (name, count, seed, fold), value in values.items()
                if (name, count) == (method.name, labels) and (first, labels, seed, fold) in values
            ]
            if len(pairs) >= MIN_PAIRS:
                compared = _compare(study.metric, pairs, recipes[first])
                rows.append(MethodDifference(study.name, method.name, first, labels, compared))
    corrected = holm([row.difference for row in rows])
    return [replace(row, difference=d) for row, d in zip(rows, corrected, strict=True)]


def _compare(metric: str, pairs: Sequence[tuple[float, float]], recipe: Recipe) -> Difference:
    # This import is late because the module imports torch.
    from vfl_party.models.metrics import lower_is_better

    method_values, first_values = zip(*pairs, strict=True)
    return difference(
        metric,
        method_values,
        first_values,
        overlap=compute_overlap(recipe, "test"),
        lower_is_better=lower_is_better(recipe.task, metric),
    )


def _get_test_settings(recipe: Recipe) -> tuple[Any, ...]:
    """Returns the settings that, together with the seed, determine the test rows."""
    rows = recipe.rows
    return rows.split, rows.test, rows.folds, rows.fold


def write_differences(path: Path, compared: Sequence[MethodDifference]) -> None:
    """Writes a CSV line for each comparison. Without comparisons, removes an earlier file. Raises
    InputError.
    """
    if not compared:
        path.unlink(missing_ok=True)
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(compared[0].row()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.row() for row in compared)
    write_atomic(path, text.getvalue())


def make_differences_table(study: StudyFile, compared: Sequence[MethodDifference]) -> Table:
    """Returns a table of the differences, with a row for each method and label count."""
    factor, unit = get_display_unit(study.metric)
    measured = f"test {study.metric}" + (f" in {unit}" if unit != study.metric else "")
    several = len(compared) > 1
    caption = "of runs with the same seed and fold"
    if several:
        caption += (
            f"; each interval alone; p and the last column corrected for {len(compared)} "
            "comparisons (Holm)"
        )
    result = Table(
        title=f"difference from {compared[0].against}: {measured}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption=caption,
        caption_justify="left",
    )
    result.add_column("method")
    if study.labels:
        result.add_column("labels", justify="right")
    for heading in ("difference", "95 % interval", *(["p"] if several else []), "pairs"):
        result.add_column(heading, justify="right")
    result.add_column("is it better?")
    form = "+.1f" if factor > 1 else "+.4g"
    for row in compared:
        d = row.difference
        assert d.low is not None and d.high is not None  # noqa: S101, PT018 - there are MIN_PAIRS or more
        result.add_row(
            row.method,
            *([f"{row.labels}"] if study.labels else []),
            f"{factor * d.mean:{form}}",
            f"{factor * d.low:{form}} to {factor * d.high:{form}}",
            *([f"{d.p:.2g}"] if several else []),
            f"{d.pairs}",
            d.verdict,
        )
    return result


def format_axis_value(value: Any) -> str:
    """Formats a value for an axis. None stands for the federation instead of a baseline."""
    return "federation" if value is None else str(value)
