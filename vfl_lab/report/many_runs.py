"""The page that compares several runs: mean and deviation over seeds, and paired differences."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import log10
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize

from vfl.summary.table import format_size
from vfl_common.config.task import LOWER_IS_BETTER
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import SEARCH
from vfl_common.text import count, list_names
from vfl_lab.report.draw import (
    BLUE,
    COLORS,
    GREEN,
    GREY,
    ORANGE,
    draw_intervals,
    draw_picture,
    set_unit_square,
    shorten_label,
)
from vfl_lab.report.facts import Facts
from vfl_lab.report.quality import (
    Estimate,
    compute_roc,
    estimate_differences,
    estimate_metrics,
    thin_out,
)
from vfl_lab.report.render import (
    PageSection,
    PageTable,
    ReportPage,
    Tile,
    format_interval,
    format_mean_and_sd,
    format_metric,
    get_metric_name,
)
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
        lines.append((run.called, gain.value, gain.low, gain.high, colors.get(outcome, GREY)))
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
    note += f" {few}" if base is not None and (few := base.describe_few_rows()) else ""
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


_MAX_KEYS = 8


_BY = {
    "tpe": "a tree-structured Parzen estimator",
    "random": "random search",
    "grid": "grid search",
}


# Finished trials: ({key: value}, objective).
Tried = Sequence[tuple[Mapping[str, Any], float]]


# Colours from the lowest to the highest value, visible on white and black and to colour-blind
# readers.
_COLORS = LinearSegmentedColormap.from_list("objective", [BLUE, GREY, ORANGE])


_LONGEST = 40


# The page of a search, from the file in its folder, and its pictures: the importance of each key,
# and the trials as lines over keys.
def is_search(folder: Path) -> bool:
    """Whether a folder contains the result of a search."""
    return (folder / SEARCH).is_file()


def make_search_page(folder: Path) -> ReportPage:
    """Returns the page of a search. Raises InputError if its file cannot be read."""
    path = folder / SEARCH
    try:
        noted = json.loads(path.read_bytes())
        return _make_page(noted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is damaged. Make the same search again, which writes the file without "
            "repeating a run.",
        ) from None


def _make_page(noted: Mapping[str, Any]) -> ReportPage:
    trials, name, objective = noted["trials"], noted["name"], noted["objective"]
    metric = objective.partition(" ")[2]
    counts = {s: sum(t["state"] == s for t in trials) for s in ("finished", "pruned", "failed")}
    best = ", ".join(f"{key} = {_format(setting)}" for key, setting in noted["best"].items())
    page = ReportPage(
        f"{name}: hyperparameter search",
        f"Search of {count(len(noted['spaces']), 'setting')} by {_BY[noted['by']]}: "
        f"{count(len(trials), 'run')}.",
        lead=[
            f"The best {objective} is {format_metric(noted['value'])}, with {best}.",
            "It is the best of many runs, so its objective is optimistic. Judge it by the test "
            "rows, and compare it with your own settings over seeds that the search did not use.",
        ],
        tiles=[
            Tile(
                f"validation {get_metric_name(metric)}",
                format_metric(noted["value"]),
                "of the best run",
            ),
            *(
                Tile(f"test {get_metric_name(key)}", format_metric(score), "of the best run")
                for key, score in noted["test"].items()
                if key == metric
            ),
            *(
                Tile(state, *count(number, "run").split())
                for state, number in counts.items()
                if number
            ),
        ],
        made=f"Made by vfl report from a search of {name}. The best run is {noted['run']}.",
    )
    page.parts = [_make_keys_section(noted), _make_trials_section(noted, metric)]
    return page


def _make_keys_section(noted: Mapping[str, Any]) -> PageSection:
    """Returns the pictures of the effect of the settings."""
    part = PageSection("keys", "Effect of the settings")
    tried = [(t["values"], t["value"]) for t in noted["trials"] if t["value"] is not None]
    spaces = dict(list(noted["spaces"].items())[:_MAX_KEYS])
    if tried:
        alt = f"A line for each finished run over {', '.join(spaces)}, by {noted['objective']}"
        drawn = partial(draw_parallel, spaces=spaces, tried=tried, objective=noted["objective"])
        size = (compute_width(spaces), 4.2)
        part.pictures.append(draw_picture("parallel", "The finished runs", alt, drawn, size=size))
    shares = noted["importance"]
    if shares:
        words = ", ".join(f"{key} {share:.2f}" for key, share in shares.items())
        drawn, size = partial(draw_importance, shares=shares), (4.6, 1.1 + 0.32 * len(shares))
        title = "Importance of each setting"
        part.pictures.append(
            draw_picture("importance", title, f"{title}: {words}", drawn, size=size)
        )
        part.text.append(
            "The importance of a setting is its share in the variance of the objective (fANOVA). "
            "It describes differences of these runs, not their causes."
        )
    return part


def _make_trials_section(noted: Mapping[str, Any], metric: str) -> PageSection:
    """Returns the table of all runs, in the order of the search."""
    part, keys = PageSection("runs", "Runs"), list(noted["spaces"])
    rows = [
        [
            f"{number}",
            *(_format(trial["values"].get(key)) for key in keys),
            trial["state"] + (f": {trial['error']}" if trial["error"] else ""),
            "–" if trial["value"] is None else format_metric(trial["value"]),
        ]
        for number, trial in enumerate(noted["trials"], start=1)
    ]
    heads = ["run", *keys, "end", f"validation {get_metric_name(metric)}"]
    words = frozenset({0, *range(1, len(keys) + 2)})
    part.tables.append(PageTable("All runs, in the order of the search", heads, rows, words))
    return part


def _format(setting: Any) -> str:
    return (
        f"{setting:.4g}" if isinstance(setting, float) else "–" if setting is None else str(setting)
    )


def compute_width(spaces: Mapping[str, Any]) -> float:
    """Returns the width of the picture of trials, in inches."""
    return 2.2 * max(2, len(spaces)) + 1.5


def draw_importance(axes: Axes, shares: Mapping[str, float]) -> None:
    """Draws the share of each key in the variance of the objective."""
    keys = sorted(shares, key=lambda key: shares[key])
    axes.barh(
        [shorten_label(key, _LONGEST) for key in keys], [shares[key] for key in keys], color=BLUE
    )
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance (fANOVA)")
    axes.grid(axis="y", visible=False)


def draw_parallel(axes: Axes, spaces: Mapping[str, Any], tried: Tried, objective: str) -> None:
    """Draws a line for each finished trial over the keys, coloured by the objective.

    ``spaces``: {key: its values, or a dict with ``from``, ``to`` and ``log``}.
    """
    scores = [score for _, score in tried]
    scale = Normalize(min(scores), max(scores))
    for values, score in tried:
        heights = [_compute_height(space, values[key]) for key, space in spaces.items()]
        color = _COLORS(scale(score))
        axes.plot(range(len(spaces)), heights, color=color, marker="o", alpha=0.8)
    for place, space in enumerate(spaces.values()):
        for height, text in _list_ticks(space):
            axes.annotate(
                text, (place, height), (5, 4), textcoords="offset points", fontsize="small"
            )
        axes.axvline(place, color=GREY, zorder=0, linewidth=0.8)
    names = [shorten_label(key, _LONGEST) for key in spaces]
    axes.set_xticks(range(len(spaces)), names, rotation=15, ha="right")
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(spaces) - 0.5)
    axes.grid(visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure = axes.get_figure()
    assert figure is not None  # noqa: S101 - axes of a figure
    figure.colorbar(ScalarMappable(scale, _COLORS), ax=axes, label=objective)


def _compute_height(space: Any, value: Any) -> float:
    """Returns the position of a value on its axis, from 0 to 1."""
    if isinstance(space, Mapping):
        low, high = space["from"], space["to"]
        if space.get("log"):
            low, high, value = log10(low), log10(high), log10(value)
        return float((value - low) / (high - low))
    return list(space).index(value) / max(1, len(space) - 1)


def _list_ticks(space: Any) -> list[tuple[float, str]]:
    values = [space["from"], space["to"]] if isinstance(space, Mapping) else list(space)
    return [
        (
            _compute_height(space, value),
            shorten_label(f"{value:g}" if isinstance(value, float) else str(value)),
        )
        for value in values
    ]


RESULTS, DIFFERENCES = "results.csv", "differences.csv"


_STUDY_COLORS = {"federated": BLUE, "pooled": GREY, "alone": ORANGE}


_MAX_STUDY_LINES = 40


Line = Mapping[str, str]


def is_study(folder: Path) -> bool:
    """Whether a folder contains the results of a study."""
    return (folder / RESULTS).is_file() and not (folder / "summary.json").is_file()


def make_study_page(folder: Path) -> ReportPage:
    """Returns the page of a study. Raises InputError if its results cannot be read."""
    lines = _read_csv(folder / RESULTS)
    metrics = list(
        dict.fromkeys(
            key.removeprefix("test_") for line in lines for key in line if key.startswith("test_")
        )
    )
    if not lines or not metrics:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / RESULTS}: contains no test metrics yet. Wait until vfl study has finished "
            "a "
            "run.",
        )
    decides = [name for name in ("auc", *MAIN_METRICS.values()) if name in metrics]
    metric = decides[0] if decides else metrics[0]
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["method"], line.get("labels", "")), []).append(line)
    seeds = {line["seed"] for line in lines}
    name = lines[0]["study"]
    page = ReportPage(
        f"{name}: methods compared",
        f"Study {name}: {len(lines)} runs, {len(seeds)} seeds.",
        lead=["This page shows mean ± standard deviation of each method's runs on the test rows."],
        tiles=[
            _make_tile(key, _collect_values(own, metric), metric)
            for key, own in list(groups.items())[:8]
        ],
        made=f"Made by vfl report from the study {name}.",
    )
    page.parts = [_make_methods_section(groups, metrics, metric), _make_differences_section(folder)]
    return page


def _make_tile(key: tuple[str, str], values: Sequence[float], metric: str) -> Tile:
    middle, _, sd = format_mean_and_sd(values).partition(" ± ")
    of = f"{get_metric_name(metric)} of {len(values)} runs"
    return Tile(_format_label(key), middle, f"± {sd}, {of}" if sd else of)


def _make_methods_section(
    groups: Mapping[tuple[str, str], Sequence[Line]], metrics: Sequence[str], metric: str
) -> PageSection:
    part = PageSection("methods", "Methods")
    points, rows = [], []
    for key, own in groups.items():
        values = _collect_values(own, metric)
        if values:
            spread = stdev(values) if len(values) > 1 else 0.0
            middle = mean(values)
            color = _STUDY_COLORS.get(own[0].get("group", ""), BLUE)
            points.append((_format_label(key), middle, middle - spread, middle + spread, color))
        bytes_, seconds = (
            [
                sum(_parse_numbers(line, [f"{stage}_{what}" for stage in ("pretrain", "finetune")]))
                for line in own
            ]
            for what in ("bytes", "s")
        )
        cells = [format_mean_and_sd(_collect_values(own, metric)) for metric in metrics]
        rows.append(
            [
                _format_label(key),
                own[0].get("group", ""),
                f"{len(own)}",
                *cells,
                format_size(round(mean(bytes_))),
                f"{mean(seconds):.1f}",
            ]
        )
    what = f"Test {get_metric_name(metric)}: mean and standard deviation"
    part.pictures.append(
        draw_intervals("methods", what, what, points[:_MAX_STUDY_LINES], get_metric_name(metric))
    )
    heads = ["method", "columns", "runs", *map(get_metric_name, metrics), "bytes", "seconds"]
    note = "Bytes and seconds of training are means over the runs of a method."
    part.tables.append(
        PageTable("Test metrics: mean ± standard deviation", heads, rows, frozenset({0, 1}), note)
    )
    return part


def _make_differences_section(folder: Path) -> PageSection:
    part = PageSection("differences", "Is a method better than the first?")
    lines = _read_csv(folder / DIFFERENCES) if (folder / DIFFERENCES).is_file() else []
    colors = {"better": GREEN, "worse": ORANGE}
    rows, points = [], []
    for line in lines:
        low, high, middle, p = (
            (_parse_numbers(line, [key]) or [math.nan])[0]
            for key in ("low", "high", "difference", "p")
        )
        called = _format_label((line["method"], line.get("labels", "")))
        rows.append(
            [
                called,
                f"{middle:+.4f}",
                f"{low:+.4f} to {high:+.4f}",
                f"{p:.2g}",
                line.get("pairs", ""),
                line.get("verdict", ""),
            ]
        )
        points.append((called, middle, low, high, colors.get(line.get("verdict", ""), GREY)))
    if lines:
        what = f"{get_metric_name(lines[0]['metric'])} minus that of {lines[0]['against']}"
        part.pictures.append(
            draw_intervals(
                "differences",
                what,
                what,
                points[:_MAX_STUDY_LINES],
                get_metric_name(lines[0]["metric"]),
                zero=True,
            )
        )
        heads = ["method", "difference", "95 % interval", "p", "pairs", "is it better?"]
        note = "Pairs have the same seed and fold. p is corrected for all comparisons (Holm)."
        part.tables.append(PageTable(what, heads, rows, frozenset({0, 5}), note))
    return part


def _read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        if any(key not in line for line in lines for key in ("study", "method")):
            raise ValueError
    except (OSError, ValueError, csv.Error):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read as the results of a study. Run vfl study again.",
        ) from None
    return lines


def _format_label(key: tuple[str, str]) -> str:
    return f"{key[0]}, {key[1]} labels" if key[1] else key[0]


def _collect_values(lines: Sequence[Line], metric: str) -> list[float]:
    return [number for line in lines for number in _parse_numbers(line, [f"test_{metric}"])]


def _parse_numbers(line: Line, keys: Sequence[str]) -> list[float]:
    numbers = []
    for key in keys:
        try:
            numbers.append(float(line.get(key) or ""))
        except ValueError:
            continue
    return numbers
