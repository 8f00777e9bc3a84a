"""Compares a new model with an old model on the same rows: metrics, and intervals of their
differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.text import Text

from vfl.summary.table import new_table, wide_console
from vfl_common.config.task import LOWER_IS_BETTER, class_text
from vfl_common.errors import Code, InputError
from vfl_common.text import clean
from vfl_party.base.statistics import (
    MIN_CLASS_ROWS,
    Floats,
    compute_auc,
    compute_interval,
    compute_log_losses,
    describe_few_rows,
    resample,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl_lab.production.scored import ModelScores

Outcome = Literal["better", "worse", "no difference", "too few rows"]

_NAMES = {
    "auc": "AUC",
    "rmse": "RMSE",
    "mae": "MAE",
    "log_loss": "log loss",
    "brier": "Brier score",
}


@dataclass(frozen=True)
class Measure:
    """A metric of the old and the new model on the same rows.

    ``low`` and ``high`` are the ends of the 95 % interval of ``difference``; NaN if a class has too
    few rows.
    """

    metric: str
    old: float
    new: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """The metric of the new model minus the metric of the old model."""
        return self.new - self.old

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value is better, as for AUC."""
        return self.metric not in LOWER_IS_BETTER

    @property
    def name(self) -> str:
        """The name of the metric in tables."""
        return _NAMES.get(self.metric, self.metric)

    @property
    def largest_loss(self) -> float:
        """The largest loss of the new model that the interval contains. For RMSE and MAE it is a
        share of the old model's value. It is negative if the whole interval is better.
        """
        loss = -self.low if self.higher_is_better else self.high
        if self.metric not in ("rmse", "mae"):
            return loss
        return loss / self.old if self.old > 0 else math.inf if loss > 0 else 0.0

    @property
    def outcome(self) -> Outcome:
        """``better`` or ``worse`` if the interval does not contain 0, else ``no difference``; ``too
        few rows`` without an interval.
        """
        if math.isnan(self.low) or math.isnan(self.high):
            return "too few rows"
        low, high = (self.low, self.high) if self.higher_is_better else (-self.high, -self.low)
        return "better" if low > 0 else "worse" if high < 0 else "no difference"


@dataclass(frozen=True)
class Comparison:
    """The comparison of two models on the same rows.

    Args:
        old: The name of the old model.
        new: The name of the new model.
        rows: The number of rows.
        which: A description of the rows, such as ``new rows``.
        measures: The metrics. The first metric decides the outcome: AUC for two classes, accuracy
            for several classes, or RMSE.
        scores: The scores of the old and the new model, [N, C] each.
        unlabelled: The number of new rows that were left out because they have no label.
        few: Sentences about too few rows of the smaller of two classes, or ''.
    """

    old: str
    new: str
    rows: int
    which: str
    measures: tuple[Measure, ...]
    scores: tuple[Floats, Floats]
    unlabelled: int = 0
    few: str = ""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the first metric."""
        return self.measures[0].outcome

    @property
    def verdict(self) -> str:
        """A sentence that states the result."""
        measure = self.measures[0]
        claim = {
            "better": f"{self.new} is better than {self.old}",
            "worse": f"{self.new} is worse than {self.old}",
            "no difference": f"no significant difference between {self.old} and {self.new}",
            "too few rows": f"no verdict on {self.new} and {self.old}",
        }[self.outcome]
        interval = f"95 % interval {measure.low:+.4f} to {measure.high:+.4f}"
        return (
            f"{claim} on {self.rows:,} {self.which}: {measure.name} {measure.new:.4f} against "
            f"{measure.old:.4f}, {measure.difference:+.4f} "
            f"({'no interval' if self.outcome == 'too few rows' else interval})"
        )

    def too_few(self, margin: float) -> str:
        """Returns a sentence if there are too few rows to exclude that the new model is worse by
        more than ``margin`` (in the unit of ``Measure.largest_loss``). Returns '' if there are
        enough rows, or if the new model is worse.
        """
        loss = self.measures[0].largest_loss
        # Without an interval the loss is NaN, for which this comparison is False.
        if loss <= margin or self.outcome == "worse":
            return ""
        if self.outcome == "too few rows":
            return "Compare on more rows."
        return (
            f"{self.rows:,} rows do not rule out a loss of {loss:.4f}, which is more "
            f"than {margin:g}. Compare on more rows, or give a larger --margin."
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that ``vfl compare --json`` prints."""
        measures = {
            measure.metric: {
                "old": measure.old,
                "new": measure.new,
                "difference": measure.difference,
                "low": measure.low,
                "high": measure.high,
            }
            for measure in self.measures
        }
        facts: dict[str, Any] = {"old": self.old, "new": self.new, "rows": self.rows}
        facts |= {"unlabelled": self.unlabelled, "largest_loss": self.measures[0].largest_loss}
        facts |= {"outcome": self.outcome, "verdict": self.verdict, "few": self.few}
        return facts | {"decides": self.measures[0].metric, "measures": measures}

    def plot(self) -> Figure:
        """Draws the differences with their intervals, and the scores of both models."""
        from vfl_lab.report.charts import draw_comparison

        return draw_comparison(self)

    def __repr__(self) -> str:
        return f"Comparison({self.verdict!r})"


def compare(
    old: str | Path | Any,
    new: str | Path | Any,
    data: Mapping[str, Any] | None = None,
    *,
    truth: str | None = None,
    label: str | None = None,
) -> Comparison:
    """Compares two models on the same rows.

    The difference of two AUCs has DeLong's interval for paired curves (DeLong, DeLong and
    Clarke-Pearson 1988). Other metrics have an interval from a paired bootstrap over rows (1,000
    resamples, percentiles). The comparison is invalid on rows that one of the models was trained
    or tuned on.

    Args:
        old: The old model: the folder of a run, a ``Run``, or a file that ``vfl-party predict``
            wrote. Two runs are compared on the test rows that both have.
        new: The new model, in the same form as ``old``.
        data: {party: new rows}, as in ``Run.predict``. Both runs score these rows on this machine.
            The active party's rows need the label. Rows without a label are left out.
        truth: For score files, a table of the active party with ids and labels.
        label: For score files, the column of ``truth`` with the label. Rows without a label are
            left out.

    Returns a ``Comparison``. Raises VflError.
    """
    from vfl_lab.production import scored

    paths = [Path(getattr(model, "folder", model)) for model in (old, new)]
    are_files = [scored.is_file(path) for path in paths]
    if any(are_files):
        if not all(are_files) or data is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: a run cannot be compared with a score file. Give two runs, or two score "
                "files with --truth.",
            )
        if truth is None or label is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: score files do not contain labels. Give --truth (a table) and --label "
                "(its column).",
            )
        model_scores = [scored.read_file(path, truth, label) for path in paths]
        which, names = "new rows", [path.name for path in paths]
    else:
        if truth is not None or label is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: --truth and --label are only for score files. Give new rows with --data.",
            )
        runs = [_locate_run(path) for path in paths]
        names = [run.name for run, _ in runs]
        if data is None:
            model_scores = [scored.read_test_rows(*run) for run in runs]
            which = "test rows of both"
        else:
            model_scores = [scored.score_new_rows(run, data, active) for run, active in runs]
            which = "new rows"
    old_scores, new_scores = scored.select_common_rows(*model_scores)
    return Comparison(
        names[0],
        names[1],
        len(old_scores.keys),
        which,
        compute_measures(old_scores, new_scores),
        (old_scores.scores_NC, new_scores.scores_NC),
        old_scores.unlabelled,
        _describe_few_rows(old_scores),
    )


def _describe_few_rows(scores: ModelScores) -> str:
    """Returns sentences about too few rows of the smaller of two classes, or ''."""
    if scores.classes is None or len(scores.names) > 1 or scores.truth is None:
        return ""
    positive = scores.names[0].removeprefix("score_")
    positives = sum(class_text(value) == positive for value in scores.truth)
    return describe_few_rows(positives, len(scores.truth))


def _locate_run(path: Path) -> tuple[Path, str]:
    """Returns the folder of a run and the name of its active party. Raises InputError."""
    from vfl_common.run_folder import RunFolder

    folder = path.resolve()
    # The path may be a party's folder in the folder of the run.
    folder = folder.parent if (folder / "run.json").is_file() else folder
    record = next(iter(sorted(folder.glob("*/run.json"))), None)
    if record is None:
        raise InputError(Code.FILE_INVALID, f"{path}: contains no run. Give the folder OUT/RUN-ID.")
    return folder, RunFolder(record.parent, folder.name).recipe().active.name


def compute_measures(old: ModelScores, new: ModelScores) -> tuple[Measure, ...]:
    """Computes the metrics of two models on the same rows. The metric that decides comes first.

    Without ``MIN_CLASS_ROWS`` rows of each of two classes, no metric has an interval.
    """
    assert old.truth is not None  # noqa: S101 - the caller has added the labels
    if old.classes is None:
        true_N = np.array(old.truth, np.float64)
        errors = [model.scores_NC[:, 0] - true_N for model in (old, new)]
        errors_by_metric = {
            "rmse": [error_N**2 for error_N in errors],
            "mae": [np.abs(error_N) for error_N in errors],
        }
        return tuple(_bootstrap(errors_by_metric))
    names = [name.removeprefix("score_") for name in old.names]
    truth = [class_text(value) for value in old.truth]
    losses: dict[str, list[Floats]] = {"accuracy": [], "log_loss": [], "brier": []}
    hit_NC = np.array([[value == name for name in names] for value in truth], np.float64)
    for model in (old, new):
        assert model.classes is not None  # noqa: S101 - both models have the same columns
        correct = [predicted == true for predicted, true in zip(model.classes, truth, strict=True)]
        losses["accuracy"].append(np.array(correct, np.float64))
        p_NC, is_NC = model.scores_NC, hit_NC
        if len(names) == 1:
            p_NC = np.concatenate([1 - p_NC, p_NC], axis=1)
            is_NC = np.concatenate([1 - is_NC, is_NC], axis=1)
        losses["log_loss"].append(compute_log_losses((p_NC * is_NC).sum(axis=1)))
        brier_N = ((p_NC - is_NC) ** 2).sum(axis=1)
        losses["brier"].append(brier_N / 2 if len(names) == 1 else brier_N)
    measures = _bootstrap(losses)
    if len(names) == 1 and 0 < hit_NC.sum() < len(hit_NC):
        scores = [model.scores_NC[:, 0] for model in (old, new)]
        measures.insert(0, auc_difference(hit_NC[:, 0] > 0, *scores))
    hits = hit_NC.sum()
    if len(names) == 1 and min(hits, len(hit_NC) - hits) < MIN_CLASS_ROWS:
        measures = [replace(measure, low=math.nan, high=math.nan) for measure in measures]
    return tuple(measures)


def auc_difference(is_positive_N: npt.NDArray[np.bool_], old_N: Floats, new_N: Floats) -> Measure:
    """Computes the AUC of both models, and DeLong's interval of the difference.

    Args:
        is_positive_N: [N] Whether each row belongs to the positive class. Both classes must occur.
        old_N: [N] The scores of the old model.
        new_N: [N] The scores of the new model for the same rows.
    """
    old, new = (compute_auc(scores_N, is_positive_N) for scores_N in (old_N, new_N))
    return Measure("auc", old.value, new.value, *new.minus(old).interval)


def _bootstrap(losses: Mapping[str, list[Floats]]) -> list[Measure]:
    """Computes metrics that are means over rows, with bootstrap intervals of their differences. The
    RMSE is the square root of such a mean.

    Args:
        losses: {metric: [terms of the old model, terms of the new model]}. The terms are the values
            for each row, [N].
    """
    terms_NT = np.stack([terms_N for pair in losses.values() for terms_N in pair], axis=1)
    rows = len(terms_NT)
    means_RT = resample(rows, lambda times_N: times_N @ terms_NT / rows)
    measures = []
    for index, metric in enumerate(losses):
        old_R, new_R = means_RT[:, 2 * index], means_RT[:, 2 * index + 1]
        if metric == "rmse":
            old_R, new_R = np.sqrt(old_R), np.sqrt(new_R)
        low, high = compute_interval((new_R - old_R)[1:])
        measures.append(Measure(metric, float(old_R[0]), float(new_R[0]), low, high))
    return measures


def show_comparison(comparison: Comparison, too_few: str = "") -> None:
    """Prints a table of the metrics, the verdict, and the sentence of ``Comparison.too_few``."""
    table = new_table(f"{comparison.rows:,} {comparison.which}")
    for heading in ("metric", "better is"):
        table.add_column(heading, no_wrap=True)
    for heading in ("old", "new", "new - old", "95 % interval"):
        table.add_column(heading, no_wrap=True, justify="right")
    for measure in comparison.measures:
        table.add_row(
            measure.name,
            "higher" if measure.higher_is_better else "lower",
            f"{measure.old:.4f}",
            f"{measure.new:.4f}",
            f"{measure.difference:+.4f}",
            "–"
            if measure.outcome == "too few rows"
            else f"{measure.low:+.4f} to {measure.high:+.4f}",
        )
    lines = [
        Text(""),
        *(
            Text(clean(sentence))
            for sentence in (comparison.verdict, comparison.few, too_few)
            if sentence
        ),
    ]
    if comparison.unlabelled:
        count = comparison.unlabelled
        left_out = f"left out: {count:,} {'row' if count == 1 else 'rows'} without a label"
        lines.append(Text(left_out, "dim"))
    wide_console().print(Group(table, *lines))
