"""Compares the methods of a study with its first one: is a difference more than chance?"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from vfl.studies.paired import LEAST, Difference, difference, holm, overlap_of
from vfl.studies.plan import Pipeline, StudyFile
from vfl.studies.report import FineTuned, points
from vfl_common.config.recipe import Recipe
from vfl_common.files import write_atomic


@dataclass(frozen=True)
class Compared:
    """A method beside the first one, with one label count."""

    study: str
    method: str
    against: str
    labels: int | None
    difference: Difference

    def row(self) -> dict[str, Any]:
        """Returns it as a line of the CSV."""
        found = self.difference
        return {
            "study": self.study,
            "method": self.method,
            "against": self.against,
            "labels": "" if self.labels is None else self.labels,
            "metric": found.metric,
            "pairs": found.pairs,
            "difference": found.mean,
            "low": found.low,
            "high": found.high,
            "p": found.p,
            "comparisons": found.comparisons,
            "verdict": found.verdict,
        }


def differences(
    study: StudyFile, chains: Sequence[Pipeline], results: Iterable[FineTuned]
) -> list[Compared]:
    """Compares every method with the first one, for each label count, over the seeds and folds that
    both have finished; the verdicts are corrected for the number of comparisons (``holm``).

    Nothing is compared with fewer than three pairs of runs, and no method whose own test rows are
    others.
    """
    recipes = {run.method: run.recipe for chain in chains for run in chain.finetune}
    values = {
        (each.method, each.labels, each.seed, each.fold): each.value(study.metric)
        for each in results
    }
    first, found = study.methods[0].name, []
    for method in study.in_groups:
        if method.name == first or _tested(recipes[method.name]) != _tested(recipes[first]):
            continue
        for labels in study.labels or (None,):
            pairs = [
                (value, values[first, labels, seed, fold])
                for (name, count, seed, fold), value in values.items()
                if (name, count) == (method.name, labels) and (first, labels, seed, fold) in values
            ]
            if len(pairs) >= LEAST:
                compared = _compared(study.metric, pairs, recipes[first])
                found.append(Compared(study.name, method.name, first, labels, compared))
    corrected = holm([each.difference for each in found])
    return [replace(each, difference=one) for each, one in zip(found, corrected, strict=True)]


def _compared(metric: str, pairs: Sequence[tuple[float, float]], recipe: Recipe) -> Difference:
    # Imports torch.
    from vfl_party.models.metrics import lower_is_better

    own, others = zip(*pairs, strict=True)
    return difference(
        metric,
        own,
        others,
        overlap=overlap_of(recipe, "test"),
        lower_is_better=lower_is_better(recipe.task, metric),
    )


def _tested(recipe: Recipe) -> tuple[Any, ...]:
    """What decides, with the seed, which rows are for testing."""
    rows = recipe.rows
    return rows.split, rows.test, rows.folds, rows.fold


def write_differences(path: Path, compared: Sequence[Compared]) -> None:
    """Writes a line for each; removes the file of an earlier result if there are none. Raises
    InputError.
    """
    if not compared:
        path.unlink(missing_ok=True)
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(compared[0].row()), lineterminator="\n")
    writer.writeheader()
    writer.writerows(each.row() for each in compared)
    write_atomic(path, text.getvalue())


def table_of_differences(study: StudyFile, compared: Sequence[Compared]) -> Table:
    """Returns a table with a row for each method and label count."""
    factor, unit = points(study.metric)
    measured = f"test {study.metric}" + (f" in {unit}" if unit != study.metric else "")
    several = len(compared) > 1
    caption = "of runs with the same seed and fold"
    if several:
        caption += (
            f"; each interval by itself; p, and so the last column, corrected for {len(compared)} "
            "comparisons (Holm)"
        )
    shown = Table(
        title=f"difference from {compared[0].against}: {measured}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption=caption,
        caption_justify="left",
    )
    shown.add_column("method")
    if study.labels:
        shown.add_column("labels", justify="right")
    for heading in ("difference", "95 % interval", *(["p"] if several else []), "pairs"):
        shown.add_column(heading, justify="right")
    shown.add_column("is it better?")
    form = "+.1f" if factor > 1 else "+.4g"
    for each in compared:
        found = each.difference
        assert found.low is not None and found.high is not None  # noqa: S101, PT018 - of LEAST
        shown.add_row(
            each.method,
            *([f"{each.labels}"] if study.labels else []),
            f"{factor * found.mean:{form}}",
            f"{factor * found.low:{form}} to {factor * found.high:{form}}",
            *([f"{found.p:.2g}"] if several else []),
            f"{found.pairs}",
            found.verdict,
        )
    return shown
