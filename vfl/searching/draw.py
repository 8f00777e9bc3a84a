"""Draws a search as PNG: how much each key matters, and the trials as lines over the keys. Imports
matplotlib, without a display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from vfl.searching.spaces import Between, Space
from vfl.studies.lines import named

_DPI = 130


def draw_importance(shares: Mapping[str, float], path: Path) -> None:
    """Draws the share of each key in the variance of the objective."""
    figure = Figure(figsize=(6.4, 1.4 + 0.4 * len(shares)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    keys = sorted(shares, key=lambda key: shares[key])
    axes.barh(keys, [shares[key] for key in keys], color="#0072B2")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance (fANOVA)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)


def draw_parallel(
    spaces: Mapping[str, Space],
    tried: Sequence[tuple[Mapping[str, Any], float]],
    objective: str,
    path: Path,
) -> None:
    """Draws a line for each finished trial over the keys, coloured by the objective. ``tried``:
    the values, as the spaces have them, and the objective.
    """
    figure = Figure(figsize=(2.2 * max(2, len(spaces)) + 1.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    scores = [score for _, score in tried]
    scale, colors = Normalize(min(scores), max(scores)), colormaps["viridis"]
    for values, score in tried:
        heights = [_height(space, values[key]) for key, space in spaces.items()]
        axes.plot(range(len(spaces)), heights, color=colors(scale(score)), marker="o", alpha=0.8)
    for place, space in enumerate(spaces.values()):
        for height, text in _ticks(space):
            axes.annotate(
                text, (place, height), (4, 0), textcoords="offset points", fontsize="small"
            )
        axes.axvline(place, color="0.8", zorder=0)
    axes.set_xticks(range(len(spaces)), list(spaces), rotation=15, ha="right")
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(spaces) - 0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.colorbar(ScalarMappable(scale, colors), ax=axes, label=objective)
    figure.savefig(path, dpi=_DPI)


def _height(space: Space, value: Any) -> float:
    """Returns where a value is on its axis, from 0 to 1."""
    if isinstance(space, Between):
        low, high = space.low, space.high
        if space.log:
            low, high, value = log10(low), log10(high), log10(value)
        return float((value - low) / (high - low))
    return space.values.index(value) / max(1, len(space.values) - 1)


def _ticks(space: Space) -> list[tuple[float, str]]:
    values = (space.low, space.high) if isinstance(space, Between) else space.values
    return [
        (_height(space, each), f"{each:g}" if isinstance(each, float) else named(each))
        for each in values
    ]
