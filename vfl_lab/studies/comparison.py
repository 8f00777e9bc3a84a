"""Tests whether each method of a study differs significantly from the first method."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from vfl_common.config.recipe import Recipe
from vfl_common.files import write_atomic
from vfl_lab.studies.paired import MIN_PAIRS, Difference, compute_overlap, difference, holm
from vfl_lab.studies.plan import Pipeline, StudyFile
from vfl_lab.studies.report import FineTuned, get_display_unit


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
