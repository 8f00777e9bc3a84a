"""The page that compares several runs: mean and deviation over seeds, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from matplotlib.axes import Axes

from vfl.summary.table import format_size
from vfl_common.config.task import LOWER_IS_BETTER
from vfl_common.text import list_names
from vfl_lab.report.page.draw import draw_intervals, draw_picture, set_unit_square
from vfl_lab.report.page.facts import Facts
from vfl_lab.report.page.render import ReportPage
from vfl_lab.report.page.svg import BLUE, COLORS, GREEN, GREY, ORANGE, shorten_label
from vfl_lab.report.page.tables import (
    PageSection,
    PageTable,
    Tile,
    format_interval,
    format_mean_and_sd,
    format_metric,
    get_metric_name,
)
from vfl_lab.report.quality.curves import compute_roc, thin_out
from vfl_lab.report.quality.measures import Estimate, estimate_differences, estimate_metrics
from vfl_party.base.statistics import MAIN_METRICS

# Maximum number of lines and of curves in a picture.
_MAX_LINES, _MAX_CURVES = 24, 7


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared with others."""

    facts: Facts

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.facts.run.summary.run_id

    @property
    def called(self) -> str:
        """The run id without its date, for pictures."""
        name = self.run_id
        return name.split("-", 2)[2] if name[:8].isdigit() and name.count("-") > 2 else name

    @cached_property
    def group(self) -> str:
        """The name of the group of runs that differ only in the seed."""
        summary = self.facts.run.summary
        alone = f", {self.facts.active} alone" if not self.facts.passives else ""
        return f"{summary.name}: {summary.method}{alone}"

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The metrics of the rows that it is judged by; without intervals if it has no stored
        predictions.
        """
        predictions = self.facts.predictions.get(self.facts.judged)
        if predictions is not None:
            return estimate_metrics(predictions)
        named = self.facts.run.summary.metrics.get("test", {})
        nan = float("nan")
        return {name: Estimate(one, nan, nan, "") for name, one in named.items() if name != "loss"}

    @property
    def first(self) -> str:
        """The deciding metric."""
        recipe = self.facts.recipe
        wanted = MAIN_METRICS[recipe.task.kind] if recipe is not None else ""
        return wanted if wanted in self.estimates else next(iter(self.estimates), "")


def make_comparison_page(all_facts: Sequence[Facts]) -> ReportPage:
    """Returns the page of several runs; the others are compared with the first."""
    runs = [ComparedRun(facts) for facts in all_facts]
    metric = runs[0].first
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    page = ReportPage(
        f"{len(runs)} runs compared",
        f"{list_names([run.run_id for run in runs])}.",
        lead=_write_lead(groups, metric),
        tiles=[
            Tile(
                name,
                format_mean_and_sd([run.estimates[metric].value for run in own]),
                _describe_seeds(own),
            )
            for name, own in groups.items()
            if all(metric in run.estimates for run in own)
        ],
        made="Made by vfl report. It shows scores of people: share it only with those who may see "
        "them.",
    )
    page.parts = [
        _make_groups_section(groups),
        _make_pairs_section(runs, metric),
        _make_runs_section(runs, metric),
    ]
    return page


def _write_lead(groups: dict[str, list[ComparedRun]], metric: str) -> list[str]:
    sentences = [
        "For runs of one recipe with different seeds, this page shows mean ± standard deviation "
        "of "
        f"{get_metric_name(metric)} on the rows that each is judged by."
    ]
    means = {
        name: mean(run.estimates[metric].value for run in own)
        for name, own in groups.items()
        if all(metric in run.estimates for run in own)
    }
    if len(means) > 1:
        best = (min if metric in LOWER_IS_BETTER else max)(means, key=lambda name: means[name])
        sentences.append(f"{best} has the best mean: {format_metric(means[best])}.")
    return sentences


def _describe_seeds(own: Sequence[ComparedRun]) -> str:
    seeds = sorted({run.facts.run.summary.seed for run in own})
    return f"seed{'s' if len(seeds) > 1 else ''} {list_names([str(seed) for seed in seeds])}"


def _make_groups_section(groups: dict[str, list[ComparedRun]]) -> PageSection:
    part = PageSection("groups", "By recipe")
    names = list(dict.fromkeys(n for own in groups.values() for run in own for n in run.estimates))
    rows = []
    for group, own in groups.items():
        values = {n: [run.estimates[n].value for run in own if n in run.estimates] for n in names}
        bytes_ = mean(run.facts.run.summary.bytes.total.message_bytes for run in own)
        seconds = mean(run.facts.run.summary.wall_s for run in own)
        cells = [format_mean_and_sd(values[n]) if values[n] else "" for n in names]
        rows.append([group, f"{len(own)}", *cells, format_size(round(bytes_)), f"{seconds:.1f}"])
    heads = ["recipe", "runs", *map(get_metric_name, names), "bytes", "seconds"]
    part.tables.append(PageTable("Mean ± standard deviation over the seeds", heads, rows))
    return part


def _make_pairs_section(runs: Sequence[ComparedRun], metric: str) -> PageSection:
    part = PageSection("pairs", "On the same rows")
    first = runs[0]
    base = first.facts.predictions.get(first.facts.judged)
    colors = {"better": GREEN, "worse": ORANGE, "no difference shown": GREY}
    rows, lines = [], []
    for run in runs[1:]:
        predictions = run.facts.predictions.get(run.facts.judged)
        both = predictions.pair_with(base) if predictions is not None and base is not None else None
        gains = {} if both is None else estimate_differences(*both)
        if metric not in gains or both is None:
            rows.append([run.run_id, "–", "", "no common test rows", "0"])
            continue
        gain = gains[metric]
        outcome = gain.better(metric)
        rows.append(
            [
                run.run_id,
                f"{gain.value:+.4f}",
                format_interval(gain, "+"),
                outcome,
                f"{len(both[0]):,}",
            ]
        )
        lines.append((run.called, gain.value, gain.low, gain.high, colors[outcome]))
    if lines:
        what = f"{get_metric_name(metric)} minus that of {first.run_id}"
        title = f"Difference of {get_metric_name(metric)}"
        part.pictures.append(
            draw_intervals("pairs", title, what, lines[:_MAX_LINES], get_metric_name(metric), True)
        )
    heads = ["run", "difference", "95 % interval", "is it better?", "rows"]
    note = (
        f"Each run against {first.run_id} on their common test rows; paired intervals, without "
        "correction for several comparisons."
    )
    part.tables.append(
        PageTable(f"Differences of {get_metric_name(metric)}", heads, rows, frozenset({0, 3}), note)
    )
    return part


def _make_runs_section(runs: Sequence[ComparedRun], metric: str) -> PageSection:
    part = PageSection("runs", "Each run")
    lines = [
        (run.called, one.value, one.low, one.high, BLUE)
        for run in runs
        if (one := run.estimates.get(metric)) is not None
    ]
    if lines:
        what = f"{get_metric_name(metric)} with 95 % intervals"
        part.pictures.append(
            draw_intervals("each", what, what, lines[:_MAX_LINES], get_metric_name(metric))
        )
    curves = [
        (run.called, compute_roc(predictions.is_positive_N, predictions.scores_N))
        for run in runs[:_MAX_CURVES]
        if (predictions := run.facts.predictions.get(run.facts.judged)) is not None
        and predictions.kind == "binary"
        and 0 < predictions.truth_N.sum() < len(predictions)
    ]
    if curves:

        def draw(axes: Axes) -> None:
            axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
            for (name, curve), color in zip(curves, COLORS, strict=False):
                axes.plot(*thin_out(*curve), color=color, label=shorten_label(name))
            set_unit_square(axes, "false positive rate", "true positive rate")
            axes.legend(loc="lower right", fontsize=8)

        part.pictures.append(draw_picture("rocs", "ROC curves", "ROC curves of the runs", draw))
    rows = [
        [
            run.run_id,
            run.group,
            f"{run.facts.run.summary.seed}",
            format_metric(run.estimates[metric].value) if metric in run.estimates else "–",
            format_interval(run.estimates[metric]) if metric in run.estimates else "",
            format_size(run.facts.run.summary.bytes.total.message_bytes),
            f"{run.facts.run.summary.wall_s:.1f}",
        ]
        for run in runs
    ]
    heads = ["run", "recipe", "seed", get_metric_name(metric), "95 % interval", "bytes", "seconds"]
    part.tables.append(PageTable("Runs", heads, rows, frozenset({0, 1})))
    return part
