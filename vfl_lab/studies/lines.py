"""Draws a metric over the values of a recipe's key, for ``vfl.study``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    from vfl.summary.picture import NotebookFigure, style

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


def format_axis_value(value: Any) -> str:
    """Formats a value for an axis. None stands for the federation instead of a baseline."""
    return "federation" if value is None else str(value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _needs_log_axis(values: Sequence[Any]) -> bool:
    """Returns whether numbers are positive and span a factor of 20 or more."""
    return bool(min(values) > 0 and max(values) >= 20 * min(values))
