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

    ``values``: {key: value} of each run; ``metrics``: what each run had, or None.
    """
    from vfl.report.picture import Picture

    first, *others = over
    numbers = _are_numbers(over[first])
    figure = Picture(figsize=(6.0, 3.8), layout="constrained")
    axes = figure.subplots()
    for value in over[others[0]] if others else [None]:
        points = _points(over, values, metrics, first, {others[0]: value} if others else {})
        xs = [point[0] if numbers else named(point[0]) for point in points]
        label = f"{others[0]} = {named(value)}" if others else None
        means = [statistics.mean(ys) for _, ys in points]
        low, high = [min(ys) for _, ys in points], [max(ys) for _, ys in points]
        if numbers:
            (line,) = axes.plot(xs, means, marker="o", label=label)
            axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
        else:
            # Nothing lies between two names, so no line does.
            below = [middle - least for middle, least in zip(means, low, strict=True)]
            above = [most - middle for middle, most in zip(means, high, strict=True)]
            axes.errorbar(xs, means, [below, above], fmt="o", capsize=3, label=label)
            axes.margins(x=0.1)
    if numbers and _spreads(over[first]):
        axes.set_xscale("log")
    axes.set_xlabel(first)
    axes.set_ylabel(name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if others:
        axes.legend(frameon=False)
    return figure


def _points(
    over: Over, values: Values, metrics: Sequence[Any], key: str, fixed: Mapping[str, Any]
) -> list[tuple[Any, list[float]]]:
    """Returns [(value of ``key``, the metric of its runs)], of the runs with the ``fixed``
    values.
    """
    found = []
    for x in over[key]:
        wanted = {key: x, **fixed}
        of_runs = zip(values, metrics, strict=True)
        ys = [
            y
            for each, y in of_runs
            if y is not None and all(each[k] == v for k, v in wanted.items())
        ]
        if ys:
            found.append((x, ys))
    return found


def named(value: Any) -> str:
    """Names a value on an axis; None is the federation, which is no baseline."""
    return "federation" if value is None else str(value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _spreads(values: Sequence[Any]) -> bool:
    """Whether numbers are better read on a logarithmic axis."""
    return bool(min(values) > 0 and max(values) >= 20 * min(values))
