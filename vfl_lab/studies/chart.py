"""Draws the results of a study as PNG: the metric by label count, with one line for each method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


from collections.abc import Iterable
from pathlib import Path

from vfl.summary.picture import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    NotebookFigure,
    save,
    style,
)
from vfl_lab.studies.comparison import MethodDifference, format_axis_value
from vfl_lab.studies.plan import GROUPS, Group, StudyFile, StudyMethod
from vfl_lab.studies.report import (
    FineTuned,
    compute_mean_and_sd,
    describe_average,
    get_display_unit,
)

_COLORS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BLACK, GREY)
_MARKERS = "osD^vP*X"
# The line style of each group of methods.
_LINES: dict[Group, str] = {"federated": "-", "pooled": "--", "alone": ":"}
# The maximum number of methods to draw as lines. More methods are drawn as one row each.
_MAX_LINES = 6
# Points of different methods are spread over this share of the distance between label counts.
_SPREAD = 0.3


def draw_study(study: StudyFile, results: Iterable[FineTuned], path: Path) -> Path:
    """Draws the mean and standard deviation of each method over seeds and folds. Methods of a group
    are next to each other. Returns ``path``.
    """
    finished = list(results)
    if len(study.methods) > _MAX_LINES:
        return _draw_many(study, finished, path)
    factor, unit = get_display_unit(study.metric)
    by_labels = bool(study.labels)
    columns: tuple[int | None, ...] = tuple(sorted(study.labels)) if by_labels else (None,)
    count = len(study.methods)
    in_groups = len({method.group for method in study.methods}) > 1
    figure = NotebookFigure(max(5.2, 1.5 * len(columns) + 3.2) if by_labels else 5.2, 3.8)
    axes = figure.subplots()
    for number, method in enumerate(study.in_groups):
        x, y, deviations = [], [], []
        for place, labels in enumerate(columns):
            values = [
                factor * r.value(study.metric)
                for r in finished
                if r.method == method.name and r.labels == labels
            ]
            if values:
                middle, sd = compute_mean_and_sd(values)
                # The shift keeps the error bars of different methods apart.
                shift = _SPREAD * ((number + 0.5) / count - 0.5)
                x.append(place + shift if by_labels else number)
                y.append(middle)
                deviations.append(sd or 0.0)
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        line = _LINES[method.group] if by_labels else ""
        name = f"{method.name} ({method.group})" if in_groups else method.name
        axes.errorbar(
            x, y, deviations, color=color, marker=marker, linestyle=line, capsize=3, label=name
        )
    if by_labels:
        axes.set_xticks(range(len(columns)), [f"{labels:,}" for labels in columns])
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_xlabel("labelled rows")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.set_xticks(
            range(count), [method.name for method in study.in_groups], rotation=20, ha="right"
        )
        axes.set_xlim(-0.5, count - 0.5)
        for start, stop, group in _compute_spans(study.in_groups) if in_groups else ():
            if start:
                axes.axvline(start - 0.5, color="0.7", linewidth=0.8)
            middle = (start + stop - 1) / 2
            axes.annotate(
                group,
                (middle, 1.0),
                (0, 2),
                xycoords=axes.get_xaxis_transform(),
                textcoords="offset points",
                ha="center",
                color="0.4",
                fontsize="small",
            )
    axes.set_ylabel(f"test {study.metric}" + (f" ({unit})" if unit != study.metric else ""))
    axes.grid(axis="y", alpha=0.25)
    style(axes)
    averaged = f"mean and standard deviation of {describe_average(finished) or '1 seed'}"
    pad = 18 if in_groups and not by_labels else None
    axes.set_title(f"{study.name}\n{averaged}", loc="left", fontsize="medium", pad=pad)
    return save(figure, path)


def _draw_many(study: StudyFile, results: Sequence[FineTuned], path: Path) -> Path:
    """Draws a row for each method, with a point in a different colour for each label count."""
    factor, unit = get_display_unit(study.metric)
    columns: tuple[int | None, ...] = tuple(sorted(study.labels)) or (None,)
    count = len(study.methods)
    figure = NotebookFigure(7.2, 1.2 + 0.28 * count)
    axes = figure.subplots()
    for number, labels in enumerate(columns):
        x, y, deviations = [], [], []
        for row, method in enumerate(study.in_groups):
            values = [
                factor * r.value(study.metric)
                for r in results
                if r.method == method.name and r.labels == labels
            ]
            if values:
                middle, sd = compute_mean_and_sd(values)
                x.append(middle)
                y.append(row + _SPREAD * ((number + 0.5) / len(columns) - 0.5))
                deviations.append(sd or 0.0)
        label = None if labels is None else f"{labels:,} labelled rows"
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        axes.errorbar(
            x, y, xerr=deviations, color=color, marker=marker, linestyle="", capsize=2, label=label
        )
    axes.set_yticks(range(count), [method.name for method in study.in_groups])
    axes.set_ylim(count - 0.5, -0.5)
    spans = _compute_spans(study.in_groups)
    for start, stop, group in spans if len(spans) > 1 else ():
        if start:
            axes.axhline(start - 0.5, color="0.7", linewidth=0.8)
        axes.annotate(
            group,
            (1.0, (start + stop - 1) / 2),
            (3, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            rotation=-90,
            va="center",
            color="0.4",
            fontsize="small",
        )
    axes.set_xlabel(f"test {study.metric}" + (f" ({unit})" if unit != study.metric else ""))
    axes.grid(axis="both", alpha=0.25)
    style(axes)
    if columns != (None,):
        figure.legend(frameon=False, loc="outside upper right", ncols=len(columns))
    averaged = describe_average(results) or "1 seed"
    figure.suptitle(f"{study.name}: mean and sd of {averaged}", x=0.01, ha="left")
    return save(figure, path)


def draw_differences(study: StudyFile, compared: Sequence[MethodDifference], path: Path) -> None:
    """Draws the difference of each method from the first method, with its interval. A row stands
    for a method, and a colour for a label count. Without differences, removes an earlier figure.
    """
    if not compared:
        path.unlink(missing_ok=True)
        return
    factor, unit = get_display_unit(study.metric)
    names = list(dict.fromkeys(row.method for row in compared))
    columns = list(dict.fromkeys(row.labels for row in compared))
    figure = NotebookFigure(7.2, 1.5 + 0.32 * len(names))
    axes = figure.subplots()
    for number, labels in enumerate(columns):
        rows = [row for row in compared if row.labels == labels]
        x = [factor * row.difference.mean for row in rows]
        ends = [(row.difference.low, row.difference.high) for row in rows]
        below = [m - factor * (low or 0.0) for m, (low, _) in zip(x, ends, strict=True)]
        above = [factor * (high or 0.0) - m for m, (_, high) in zip(x, ends, strict=True)]
        shift = _SPREAD * ((number + 0.5) / len(columns) - 0.5)
        axes.errorbar(
            x,
            [names.index(row.method) + shift for row in rows],
            xerr=[below, above],
            color=_COLORS[number % len(_COLORS)],
            marker=_MARKERS[number % len(_MARKERS)],
            linestyle="",
            capsize=3,
            label=None if labels is None else f"{labels:,} labelled rows",
        )
    axes.axvline(0.0, color="0.3", linewidth=1.0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(f"difference of test {study.metric}" + (f" ({unit})" if factor > 1 else ""))
    axes.grid(axis="x", alpha=0.25)
    style(axes)
    if columns != [None]:
        figure.legend(frameon=False, loc="outside upper right", ncols=len(columns))
    pair_counts = sorted({row.difference.pairs for row in compared})
    count = f"{pair_counts[0]}"
    if len(pair_counts) > 1:
        count += f" to {pair_counts[-1]}"
    title = f"{study.name}: difference from {compared[0].against}"
    figure.suptitle(f"{title}\n95 % intervals, {count} pairs of runs", x=0.01, ha="left")
    save(figure, path)


def _compute_spans(methods: Sequence[StudyMethod]) -> list[tuple[int, int, Group]]:
    """Returns (first index, index after the last, group) for each group of the sorted methods."""
    groups = [method.group for method in methods]
    return [
        (groups.index(group), groups.index(group) + groups.count(group), group)
        for group in GROUPS
        if group in groups
    ]


Over = Mapping[str, Sequence[Any]]


Values = Sequence[Mapping[str, Any]]


def draw_values(over: Over, values: Values, name: str, metrics: Sequence[Any]) -> Figure:
    """Draws the mean of a metric over the values of a key, with its range.

    Args:
        over: {key: values}. The x axis has the values of the first key. Each value of the second
            key gets a line. The mean is over the values of all other keys.
        values: {key: value} for each run.
        name: The label of the y axis.
        metrics: The metric of each run, or None for a run without the metric.
    """
    first, *others = over
    numbers = _are_numbers(over[first])
    figure = NotebookFigure(6.0, 3.8)
    axes = figure.subplots()
    for value in over[others[0]] if others else [None]:
        points = _collect_points(over, values, metrics, first, {others[0]: value} if others else {})
        xs = [point[0] if numbers else format_axis_value(point[0]) for point in points]
        label = f"{others[0]} = {format_axis_value(value)}" if others else None
        means = [statistics.mean(ys) for _, ys in points]
        low, high = [min(ys) for _, ys in points], [max(ys) for _, ys in points]
        if numbers:
            (line,) = axes.plot(xs, means, marker="o", label=label)
            axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
        else:
            # There is no line, because there are no values between two names.
            below = [middle - bottom for middle, bottom in zip(means, low, strict=True)]
            above = [top - middle for middle, top in zip(means, high, strict=True)]
            axes.errorbar(xs, means, [below, above], fmt="o", capsize=3, label=label)
            axes.margins(x=0.1)
    if numbers and _needs_log_axis(over[first]):
        axes.set_xscale("log")
    axes.set_xlabel(first)
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
    style(axes)
    if others:
        axes.legend(frameon=False)
    return figure


def _collect_points(
    over: Over, values: Values, metrics: Sequence[Any], key: str, fixed: Mapping[str, Any]
) -> list[tuple[Any, list[float]]]:
    """Returns [(value of ``key``, metrics of the runs with that value)]. Only runs that have the
    ``fixed`` values of the other keys are used.
    """
    points = []
    for x in over[key]:
        run_values = {key: x, **fixed}
        ys = [
            y
            for run, y in zip(values, metrics, strict=True)
            if y is not None and all(run[k] == v for k, v in run_values.items())
        ]
        if ys:
            points.append((x, ys))
    return points


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _needs_log_axis(values: Sequence[Any]) -> bool:
    """Returns whether numbers are positive and span a factor of 20 or more."""
    return bool(min(values) > 0 and max(values) >= 20 * min(values))
