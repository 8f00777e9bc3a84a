"""Draws a metric over the values of a key. Imports matplotlib late, without a display."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Over = Mapping[str, Sequence[Any]]
Values = Sequence[Mapping[str, Any]]


def draw_values(over: Over, values: Values, name: str, metrics: Sequence[Any]) -> Figure:
    """Draws a metric over the first key of ``over``: a line for each value of the second, the mean
    of all others.

    ``values``: {key: value} of each run; ``metrics``: the metric of each run, or None.
    """
    from vfl.report.picture import NotebookFigure, style

    first, *others = over
    numbers = _are_numbers(over[first])
    figure = NotebookFigure(6.0, 3.8)
    axes = figure.subplots()
    for value in over[others[0]] if others else [None]:
        points = _points(over, values, metrics, first, {others[0]: value} if others else {})
        xs = [point[0] if numbers else format_axis_value(point[0]) for point in points]
        label = f"{others[0]} = {format_axis_value(value)}" if others else None
        means = [statistics.mean(ys) for _, ys in points]
        low, high = [min(ys) for _, ys in points], [max(ys) for _, ys in points]
        if numbers:
            (line,) = axes.plot(xs, means, marker="o", label=label)
            axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
        else:
            # No line: nothing lies between two names.
            below = [middle - bottom for middle, bottom in zip(means, low, strict=True)]
            above = [top - middle for middle, top in zip(means, high, strict=True)]
            axes.errorbar(xs, means, [below, above], fmt="o", capsize=3, label=label)
            axes.margins(x=0.1)
    if numbers and _spreads(over[first]):
        axes.set_xscale("log")
    axes.set_xlabel(first)
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
    style(axes)
    if others:
        axes.legend(frameon=False)
    return figure


def _points(
    over: Over, values: Values, metrics: Sequence[Any], key: str, fixed: Mapping[str, Any]
) -> list[tuple[Any, list[float]]]:
    """Returns [(value of ``key``, the metric of its runs)], of the runs with the ``fixed``
    values.
    """
    points = []
    for x in over[key]:
        wanted = {key: x, **fixed}
        ys = [
            y
            for run, y in zip(values, metrics, strict=True)
            if y is not None and all(run[k] == v for k, v in wanted.items())
        ]
        if ys:
            points.append((x, ys))
    return points


def format_axis_value(value: Any) -> str:
    """Formats a value for an axis; None is the federation, as opposed to a baseline."""
    return "federation" if value is None else str(value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _spreads(values: Sequence[Any]) -> bool:
    """Returns whether numbers need a logarithmic axis."""
    return bool(min(values) > 0 and max(values) >= 20 * min(values))
