"""Draws comparisons and drift. Imports matplotlib, without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vfl.report.picture import Picture
from vfl_common.errors import Code, InputError
from vfl_common.files import unwritable
from vfl_common.text import clean
from vfl_party.production.input_drift import DRIFTED, MOVED, Shift

if TYPE_CHECKING:
    from vfl.production.compare import Comparison

# Distinct for colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
_COLORS = {"better": _GREEN, "worse": _ORANGE, "no difference": _GREY}
_VERDICTS = {"stable": _GREY, "moved": _BLUE, "drifted": _ORANGE}
_DPI = 130
# Points of a cloud, bars, and panels of columns.
_MOST_POINTS, _MOST_BARS, _PANELS = 5_000, 20, 4
_LONGEST = 24


def compared(found: Comparison) -> Figure:
    """Draws each metric's difference with its interval, and the old scores against the new ones."""
    figure = Picture(figsize=(9.2, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    for row, each in enumerate(found.measures):
        bars = [[each.difference - each.low], [each.high - each.difference]]
        color = _COLORS[each.outcome]
        left.errorbar([each.difference], [row], xerr=np.abs(bars), fmt="o", color=color, capsize=4)
    left.axvline(0, color="black", linewidth=0.8)
    arrows = [f"{each.name} ({'↑' if each.higher_is_better else '↓'})" for each in found.measures]
    left.set_yticks(range(len(arrows)), arrows)
    left.set_ylim(len(arrows) - 0.5, -0.5)
    left.set_xlabel("new minus old, with 95 % intervals")
    left.set_title(f"{found.outcome}, by {found.measures[0].name}", loc="left", fontsize="medium")
    old, new = (each[:, 0] for each in found.scores)
    step = max(1, -(-len(old) // _MOST_POINTS))
    right.scatter(old[::step], new[::step], s=6, alpha=0.4, color=_BLUE, linewidths=0)
    ends = [min(old.min(), new.min()), max(old.max(), new.max())]
    right.plot(ends, ends, color="black", linewidth=0.8)
    right.set_xlabel("score of the old model")
    right.set_ylabel("score of the new model")
    right.set_title(f"{found.rows:,} {found.which}", loc="left", fontsize="medium")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def drifted(found: Sequence[Shift]) -> Figure:
    """Draws the index of each column, the greatest first, and how the first ones are spread."""
    shown, panels = list(found[:_MOST_BARS]), list(found[:_PANELS])
    height = max(4.2, 0.26 * len(shown) + 1.4)
    figure = Picture(figsize=(10, height), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    axes = left.subplots()
    names = [_short(each.name) for each in shown]
    colors = [_VERDICTS[each.verdict] for each in shown]
    axes.barh(range(len(shown)), [each.index for each in shown], color=colors)
    axes.set_yticks(range(len(shown)), names)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    for limit in (MOVED, DRIFTED):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"PSI index (dotted: {MOVED:g} and {DRIFTED:g})")
    more = f", the first {len(shown)} of {len(found)}" if len(found) > len(shown) else ""
    axes.set_title(f"population stability{more}", loc="left", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    grid = right.subplots(-(-len(panels) // 2), min(2, len(panels)), squeeze=False)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, each in zip(grid.flat, panels, strict=False):
        _spread(panel, each)
    grid.flat[0].legend(frameon=False, fontsize="x-small")
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a picture. Raises InputError if it cannot be written there."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise unwritable(path, error) from None
    except ValueError as error:
        raise InputError(Code.FILE_INVALID, f"{path}: {error}; end the name in .png") from None


def _spread(panel: Axes, each: Shift) -> None:
    """Draws the shares of one column's bins in training and now."""
    used = [at for at, both in enumerate(zip(each.before, each.now, strict=True)) if any(both)]
    places = np.arange(len(used))
    for shift, (counts, label, color) in enumerate(
        ((each.before, "training", _GREY), (each.now, "now", _ORANGE))
    ):
        shares = np.array([counts[at] for at in used]) / max(1, sum(counts))
        panel.bar(places + 0.4 * shift - 0.2, shares, 0.4, label=label, color=color)
    panel.set_xticks(places, [_short(each.bins[at]) for at in used], rotation=60, ha="right")
    panel.tick_params(labelsize="xx-small")
    panel.set_title(f"{_short(each.name)}: {each.index:.3f}", loc="left", fontsize="small")
    panel.spines[["top", "right"]].set_visible(False)


def _short(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
