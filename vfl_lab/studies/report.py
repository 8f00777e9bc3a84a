"""Reports the results of a study: a CSV file with a line for each run, and a table of means."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev

from rich import box
from rich.table import Table

from vfl.summary.table import format_size
from vfl_common.files import write_atomic
from vfl_common.summary import Summary
from vfl_lab.studies.plan import Group, StudyFile

# The kinds of messages whose bytes are reported separately.
KINDS = ("embedding", "gradient", "weights")
# The metrics that are printed as percentage points.
_SHARES = ("accuracy", "auc", "f1")
_SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Cost:
    """The cost of one run.

    Args:
        run: The id of the run.
        seconds: The duration of the run.
        message_bytes: The bytes of all messages.
        kinds: {kind: bytes of its messages}, for each of ``KINDS``.
        computed_with: The hardware and libraries of all parties, which affect rounding.
    """

    run: str = ""
    seconds: float = 0.0
    message_bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    computed_with: str = ""


@dataclass(frozen=True)
class FineTuned:
    """The result of one fine-tuning run, including the cost of its pretraining.

    ``preset`` is empty if no phase depends on a preset. ``metrics``: {split: {metric: value}}.
    """

    study: str
    method: str
    seed: int
    preset: str
    labels: int | None
    metrics: dict[str, dict[str, float]]
    pretrain: Cost
    finetune: Cost
    # The number of the fold from 1; None without folds.
    fold: int | None = None
    group: Group = "federated"

    def value(self, metric: str) -> float:
        """Returns the metric on the test rows; NaN if the run does not have it."""
        return self.metrics.get("test", {}).get(metric, float("nan"))

    def row(self) -> dict[str, str | int | float]:
        """Returns the result as a line of ``results.csv``."""
        cells: dict[str, str | int | float] = {
            "study": self.study,
            "method": self.method,
            "seed": self.seed,
        }
        cells |= {"fold": self.fold} if self.fold is not None else {}
        cells["group"] = self.group
        cells |= {"preset": self.preset} if self.preset else {}
        cells["labels"] = "" if self.labels is None else self.labels
        for split in _SPLITS:
            cells |= {
                f"{split}_{name}": value for name, value in self.metrics.get(split, {}).items()
            }
        for stage, cost in (("pretrain", self.pretrain), ("finetune", self.finetune)):
            cells[f"{stage}_bytes"] = cost.message_bytes
            cells |= {f"{stage}_{kind}_bytes": cost.kinds.get(kind, 0) for kind in KINDS}
            cells[f"{stage}_s"] = round(cost.seconds, 3)
            cells[f"{stage}_run"] = cost.run
            cells[f"{stage}_computed_with"] = cost.computed_with
        return cells


def compute_cost(summary: Summary) -> Cost:
    """Returns the cost of a run from its summary."""
    kinds = {
        kind: sum(link.message_bytes for link in summary.bytes.by_link if link.kind == kind)
        for kind in KINDS
    }
    computed = [str(party.arithmetic) for party in summary.parties if party.arithmetic is not None]
    return Cost(
        summary.run_id,
        summary.wall_s,
        summary.bytes.total.message_bytes,
        kinds,
        "; ".join(dict.fromkeys(computed)),
    )


def write_csv(path: Path, results: Sequence[FineTuned]) -> None:
    """Writes a CSV line for each result. A value that a result does not have stays empty. Raises
    InputError.
    """
    rows = [result.row() for result in results]
    names = sorted(
        {name for row in rows for name in row}, key=lambda name: _find_position(name, rows)
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue())


def _find_position(name: str, rows: Sequence[dict[str, str | int | float]]) -> int:
    return next(list(row).index(name) for row in rows if name in row)


def get_display_unit(metric: str) -> tuple[float, str]:
    """Returns (factor, unit) to print a metric. Accuracy, AUC and F1 are printed in points."""
    return (100.0, "points") if metric in _SHARES else (1.0, metric)


def compute_mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and the sample standard deviation of values. The standard deviation of a
    single value is None.
    """
    return mean(values), stdev(values) if len(values) > 1 else None


def format_cell(values: Sequence[float], metric: str) -> str:
    """Formats the mean and standard deviation of values, such as ``91.3 ± 0.4``."""
    if not values:
        return "–"
    factor, _ = get_display_unit(metric)
    middle, sd = compute_mean_and_sd([factor * value for value in values])
    form = ".1f" if factor > 1 else ".4g"
    return f"{middle:{form}}" + (f" ± {sd:{form}}" if sd is not None else "")


def describe_average(results: Sequence[FineTuned]) -> str:
    """Returns the numbers of folds and seeds as text, such as ``5 folds, 3 seeds``."""
    seeds = len({result.seed for result in results})
    folds = len({result.fold for result in results} - {None})
    parts = [f"{folds} folds"] if folds else []
    if seeds > 1 or parts:
        parts.append(f"{seeds} seed{'s' if seeds != 1 else ''}")
    return ", ".join(parts)


def table(study: StudyFile, results: Iterable[FineTuned]) -> Table:
    """Returns a table with a row for each method and a column for each label count. The cells are
    means over the finished seeds and folds.
    """
    finished = list(results)
    _, unit = get_display_unit(study.metric)
    averaged = describe_average(finished)
    title = f"{study.name}: test {study.metric}" + (f" in {unit}" if unit != study.metric else "")
    result = Table(
        title=f"{title}, mean ± sd of {averaged}" if averaged else title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption="bytes and seconds: training without start-up; means over all runs of a method",
        caption_justify="left",
    )
    result.add_column("method")
    in_groups = len({method.group for method in study.methods}) > 1
    if in_groups:
        result.add_column("columns")
    columns = study.labels or (None,)
    for labels in columns:
        result.add_column(study.metric if labels is None else f"{labels} labels", justify="right")
    for heading in ("pretraining", "fine-tuning", "seconds"):
        result.add_column(heading, justify="right")
    previous_group = None
    for method in study.in_groups:
        if in_groups and previous_group not in (None, method.group):
            result.add_section()
        previous_group = method.group
        method_runs = [run for run in finished if run.method == method.name]
        values = [
            format_cell(
                [run.value(study.metric) for run in method_runs if run.labels == labels],
                study.metric,
            )
            for labels in columns
        ]
        group = [f"{method.alone} alone" if method.alone else method.group] if in_groups else []
        result.add_row(method.name, *group, *values, *_format_costs(method_runs))
    return result


def _format_costs(results: Sequence[FineTuned]) -> tuple[str, str, str]:
    """Formats the mean bytes of pretraining and of fine-tuning, and the mean seconds of both."""
    if not results:
        return "–", "–", "–"
    before = mean(result.pretrain.message_bytes for result in results)
    after = mean(result.finetune.message_bytes for result in results)
    seconds = mean(result.pretrain.seconds + result.finetune.seconds for result in results)
    return (
        format_size(round(before)) if before else "–",
        format_size(round(after)),
        f"{seconds:.1f}",
    )
