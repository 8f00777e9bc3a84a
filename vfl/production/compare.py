"""Compares a new model with an old one: metrics on the same rows, and intervals of the
differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.text import Text

from vfl.report.table import new_table, wide_console
from vfl_common.config.models import class_text
from vfl_common.config.task import LOWER_IS_BETTER
from vfl_common.errors import Code, InputError
from vfl_common.text import clean
from vfl_party.base.statistics import Floats, auc_spread, log_losses, percentiles, resample

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl.production.scored import ModelScores

Outcome = Literal["better", "worse", "no difference"]

_NAMES = {
    "auc": "AUC",
    "rmse": "RMSE",
    "mae": "MAE",
    "log_loss": "log loss",
    "brier": "Brier score",
}


@dataclass(frozen=True)
class Measure:
    """One metric of the old and of the new model on the same rows.

    ``low``, ``high``: the 95 % interval of ``difference``.
    """

    metric: str
    old: float
    new: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        """New minus old."""
        return self.new - self.old

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value is better, as for AUC."""
        return self.metric not in LOWER_IS_BETTER

    @property
    def name(self) -> str:
        """The name in tables."""
        return _NAMES.get(self.metric, self.metric)

    @property
    def largest_loss(self) -> float:
        """The loss at the worse end of the interval: points of a metric or, for RMSE and MAE, a
        share of the old model's value. Negative if even that end is better.
        """
        loss = -self.low if self.higher_is_better else self.high
        if self.metric not in ("rmse", "mae"):
            return loss
        return loss / self.old if self.old > 0 else math.inf if loss > 0 else 0.0

    @property
    def outcome(self) -> Outcome:
        """``better`` or ``worse`` only if the whole interval is on that side."""
        low, high = (self.low, self.high) if self.higher_is_better else (-self.high, -self.low)
        return "better" if low > 0 else "worse" if high < 0 else "no difference"


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows.

    ``old``, ``new``: their names. ``rows``: the number of rows. ``which``: a description of the
    rows. ``measures``: the deciding one comes first: AUC, accuracy with several classes, or RMSE.
    ``unlabelled``: the number of new rows that are left out because their label is missing.
    """

    old: str
    new: str
    rows: int
    which: str
    measures: tuple[Measure, ...]
    scores: tuple[Floats, Floats]
    unlabelled: int = 0

    @property
    def outcome(self) -> Outcome:
        """The outcome of the first measure."""
        return self.measures[0].outcome

    @property
    def verdict(self) -> str:
        """The result as one sentence."""
        first = self.measures[0]
        claim = {
            "better": f"{self.new} is better than {self.old}",
            "worse": f"{self.new} is worse than {self.old}",
            "no difference": f"no significant difference between {self.old} and {self.new}",
        }[self.outcome]
        return (
            f"{claim} on {self.rows:,} {self.which}: {first.name} {first.new:.4f} against "
            f"{first.old:.4f}, {first.difference:+.4f} (95 % interval {first.low:+.4f} to "
            f"{first.high:+.4f})"
        )

    def too_few(self, margin: float) -> str:
        """Returns a sentence if the rows do not rule out that the new model is worse by more than
        ``margin``, in the unit of ``Measure.largest_loss``; '' if they do, or if it is worse.
        """
        first = self.measures[0]
        # The comparison is False for NaN, which few rows can give.
        if first.largest_loss <= margin or self.outcome == "worse":
            return ""
        return (
            f"{self.rows:,} rows do not rule out a loss of {first.largest_loss:.4f}, which is more "
            f"than {margin:g}. Compare on more rows, or give a larger --margin."
        )

    def as_json(self) -> dict[str, Any]:
        """Returns what ``vfl compare --json`` prints."""
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
        facts |= {"outcome": self.outcome, "verdict": self.verdict}
        return facts | {"decides": self.measures[0].metric, "measures": measures}

    def plot(self) -> Figure:
        """Draws the differences with their intervals, and the scores of both."""
        from vfl.production.pictures import draw_comparison

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
    Clarke-Pearson 1988); all others have that of a paired bootstrap over rows (1,000 resamples,
    percentiles). Nothing is chosen or tuned on these rows. Rows with which one of the models was
    trained make the comparison invalid.

    Args:
        old: the folder of a run, or a ``Run``, whose test rows are compared, as far as both runs
            have them; or a file that ``vfl-party predict`` wrote.
        new: the same for the new model.
        data: {party: its new rows}, as in ``Run.predict``; both runs score them on this machine.
            The active party's rows have the label; those whose label is missing are left out.
        truth: with files: a table of the active party with ids and label.
        label: with files: the column of ``truth`` that has the label; rows that miss it are left
            out.

    Returns a ``Comparison``. Raises VflError.
    """
    from vfl.production import scored

    paths = [Path(getattr(model, "folder", model)) for model in (old, new)]
    files = [scored.is_file(path) for path in paths]
    if any(files):
        if not all(files) or data is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: runs and files of scores cannot be mixed. Give two runs, or two files of "
                "scores with --truth.",
            )
        if truth is None or label is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: files of scores do not contain the labels. Give --truth (a table) and "
                "--label (its column).",
            )
        both = [scored.read_file(path, truth, label) for path in paths]
        which, names = "new rows", [path.name for path in paths]
    else:
        if truth is not None or label is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                "compare: --truth and --label are for files of scores. Give new rows with --data.",
            )
        runs = [_run(path) for path in paths]
        names = [run.name for run, _ in runs]
        if data is None:
            both = [scored.read_test_rows(*run) for run in runs]
            which = "test rows of both"
        else:
            both = [scored.score_new_rows(run, data, active) for run, active in runs]
            which = "new rows"
    first, second = scored.in_common(*both)
    return Comparison(
        names[0],
        names[1],
        len(first.keys),
        which,
        compute_measures(first, second),
        (first.scores_NC, second.scores_NC),
        first.unlabelled,
    )


def _run(path: Path) -> tuple[Path, str]:
    """Returns the folder of a run and the name of its active party. Raises InputError."""
    from vfl_common.run_folder import RunFolder

    whole = path.resolve()
    # The path may be a party's folder in that of the run.
    whole = whole.parent if (whole / "run.json").is_file() else whole
    record = next(iter(sorted(whole.glob("*/run.json"))), None)
    if record is None:
        raise InputError(
            Code.FILE_INVALID, f"{path}: does not contain a run. Give the folder OUT/RUN-ID."
        )
    return whole, RunFolder(record.parent, whole.name).recipe().active.name


def compute_measures(old: ModelScores, new: ModelScores) -> tuple[Measure, ...]:
    """Returns the metrics of two models on the same rows, the deciding one first."""
    assert old.truth is not None  # noqa: S101 - nothing is compared without it
    if old.classes is None:
        true_N = np.array(old.truth, np.float64)
        errors = [model.scores_NC[:, 0] - true_N for model in (old, new)]
        squares = {
            "rmse": [error_N**2 for error_N in errors],
            "mae": [np.abs(error_N) for error_N in errors],
        }
        return tuple(_bootstrap(squares))
    names = [name.removeprefix("score_") for name in old.names]
    truth = [class_text(value) for value in old.truth]
    losses: dict[str, list[Floats]] = {"accuracy": [], "log_loss": [], "brier": []}
    hit_NC = np.array([[value == name for name in names] for value in truth], np.float64)
    for model in (old, new):
        assert model.classes is not None  # noqa: S101 - both have the same columns
        right = [predicted == true for predicted, true in zip(model.classes, truth, strict=True)]
        losses["accuracy"].append(np.array(right, np.float64))
        p_NC, is_NC = model.scores_NC, hit_NC
        if len(names) == 1:
            p_NC = np.concatenate([1 - p_NC, p_NC], axis=1)
            is_NC = np.concatenate([1 - is_NC, is_NC], axis=1)
        losses["log_loss"].append(log_losses((p_NC * is_NC).sum(axis=1)))
        brier_N = ((p_NC - is_NC) ** 2).sum(axis=1)
        losses["brier"].append(brier_N / 2 if len(names) == 1 else brier_N)
    measures = _bootstrap(losses)
    if len(names) == 1 and 0 < hit_NC.sum() < len(hit_NC):
        scores = [model.scores_NC[:, 0] for model in (old, new)]
        measures.insert(0, auc_difference(hit_NC[:, 0] > 0, *scores))
    return tuple(measures)


def auc_difference(is_positive_N: npt.NDArray[np.bool_], old_N: Floats, new_N: Floats) -> Measure:
    """Returns both AUCs and DeLong's interval of their difference.

    Args:
        is_positive_N: whether each row is of the positive class, [N]; both classes occur.
        old_N: scores of the old model, [N].
        new_N: scores of the new model for the same rows, [N].
    """
    old, new = (auc_spread(scores_N, is_positive_N) for scores_N in (old_N, new_N))
    return Measure("auc", old.value, new.value, *new.minus(old).interval)


def _bootstrap(losses: Mapping[str, list[Floats]]) -> list[Measure]:
    """Returns metrics that are means over rows (the RMSE is the root of one), with intervals of
    their differences.

    Args:
        losses: {metric: the terms of the rows of the old and of the new model, [N] each}.
    """
    terms_NT = np.stack([terms_N for pair in losses.values() for terms_N in pair], axis=1)
    rows = len(terms_NT)
    means_RT = resample(rows, lambda times_N: times_N @ terms_NT / rows)
    measures = []
    for at, metric in enumerate(losses):
        old_R, new_R = means_RT[:, 2 * at], means_RT[:, 2 * at + 1]
        if metric == "rmse":
            old_R, new_R = np.sqrt(old_R), np.sqrt(new_R)
        low, high = percentiles((new_R - old_R)[1:])
        measures.append(Measure(metric, float(old_R[0]), float(new_R[0]), low, high))
    return measures


def show_comparison(comparison: Comparison, too_few: str = "") -> None:
    """Prints the metrics in a table, and the verdict. ``too_few``: see ``Comparison.too_few``."""
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
            f"{measure.low:+.4f} to {measure.high:+.4f}",
        )
    lines = [
        Text(""),
        *(Text(clean(sentence)) for sentence in (comparison.verdict, too_few) if sentence),
    ]
    if comparison.unlabelled:
        count = comparison.unlabelled
        left_out = f"left out: {count:,} {'row' if count == 1 else 'rows'} without a label"
        lines.append(Text(left_out, "dim"))
    wide_console().print(Group(table, *lines))
