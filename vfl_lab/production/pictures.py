"""Draws comparisons of models and drift, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vfl.summary.picture import BLUE, GREEN, GREY, ORANGE, NotebookFigure, style
from vfl_common.text import clean
from vfl_party.predict.input_drift import DRIFTED, MOVED, Shift

if TYPE_CHECKING:
    from vfl_lab.production.compare import Comparison

_COLORS = {"better": GREEN, "worse": ORANGE, "no difference": GREY}
_VERDICTS = {"stable": GREY, "moved": BLUE, "drifted": ORANGE}
# The maximum numbers of points in a scatter plot, of bars, and of panels.
_MAX_POINTS, _MAX_BARS, _MAX_PANELS = 5_000, 20, 4
_MAX_CHARACTERS = 24


def draw_comparison(comparison: Comparison) -> Figure:
    """Draws the difference of each metric with its interval, and a scatter plot of both scores."""
    figure = NotebookFigure(9.2, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    for row, measure in enumerate(comparison.measures):
        bars = [[measure.difference - measure.low], [measure.high - measure.difference]]
        color = _COLORS[measure.outcome]
        left.errorbar(
            [measure.difference], [row], xerr=np.abs(bars), fmt="o", color=color, capsize=4
        )
    left.axvline(0, color="black", linewidth=0.8)
    arrows = [
        f"{measure.name} ({'↑' if measure.higher_is_better else '↓'})"
        for measure in comparison.measures
    ]
    left.set_yticks(range(len(arrows)), arrows)
    left.set_ylim(len(arrows) - 0.5, -0.5)
    left.set_xlabel("new minus old, with 95 % intervals")
    left.set_title(
        f"{comparison.outcome}, by {comparison.measures[0].name}", loc="left", fontsize="medium"
    )
    old, new = (scores_NC[:, 0] for scores_NC in comparison.scores)
    step = max(1, -(-len(old) // _MAX_POINTS))
    right.scatter(old[::step], new[::step], s=6, alpha=0.4, color=BLUE, linewidths=0)
    ends = [min(old.min(), new.min()), max(old.max(), new.max())]
    right.plot(ends, ends, color="black", linewidth=0.8)
    right.set_xlabel("score of the old model")
    right.set_ylabel("score of the new model")
    right.set_title(f"{comparison.rows:,} {comparison.which}", loc="left", fontsize="medium")
    for axes in (left, right):
        style(axes)
    return figure


def draw_drift(shifts: Sequence[Shift]) -> Figure:
    """Draws the stability index of each column, and the distributions of the first columns."""
    bars, panels = list(shifts[:_MAX_BARS]), list(shifts[:_MAX_PANELS])
    height = max(4.2, 0.26 * len(bars) + 1.4)
    figure = NotebookFigure(10, height)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    axes = left.subplots()
    names = [_shorten(shift.name) for shift in bars]
    colors = [_VERDICTS[shift.verdict] for shift in bars]
    axes.barh(range(len(bars)), [shift.index for shift in bars], color=colors)
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    for limit in (MOVED, DRIFTED):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"PSI index (dotted: {MOVED:g} and {DRIFTED:g})")
    limit_note = f", the first {len(bars)} of {len(shifts)}" if len(shifts) > len(bars) else ""
    axes.set_title(f"population stability{limit_note}", loc="left", fontsize="medium")
    style(axes)
    grid = right.subplots(-(-len(panels) // 2), min(2, len(panels)), squeeze=False)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, shift in zip(grid.flat, panels, strict=False):
        _draw_distribution(panel, shift)
    grid.flat[0].legend(frameon=False, fontsize="x-small")
    return figure


def _draw_distribution(panel: Axes, column: Shift) -> None:
    """Draws the share of rows in each bin of a column, in training and now."""
    # Bins that are empty in training and now are left out.
    used_bins = [
        index
        for index, counts in enumerate(zip(column.before, column.now, strict=True))
        if any(counts)
    ]
    places = np.arange(len(used_bins))
    for shift, (counts, label, color) in enumerate(
        ((column.before, "training", GREY), (column.now, "now", ORANGE))
    ):
        shares = np.array([counts[index] for index in used_bins]) / max(1, sum(counts))
        panel.bar(places + 0.4 * shift - 0.2, shares, 0.4, label=label, color=color)
    panel.set_xticks(
        places, [_shorten(column.bins[index]) for index in used_bins], rotation=60, ha="right"
    )
    panel.tick_params(labelsize="xx-small")
    panel.set_title(f"{_shorten(column.name)}: {column.index:.3f}", loc="left", fontsize="small")
    style(panel)


def _shorten(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 1]}…"
