"""Draws a search as PNG: how much each key matters, and the trials as lines over the keys. Imports
matplotlib, without a display.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vfl.report.page.search_draw import Tried, importance, parallel, width_of

_DPI = 130


def draw_importance(shares: Mapping[str, float], path: Path) -> None:
    """Draws the share of each key in the variance of the objective."""
    figure = Figure(figsize=(6.4, 1.4 + 0.4 * len(shares)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    importance(axes, shares)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=_DPI)


def draw_parallel(spaces: Mapping[str, Any], tried: Tried, objective: str, path: Path) -> None:
    """Draws a line for each finished trial over the keys, coloured by the objective. The arguments
    are those of ``parallel``.
    """
    figure = Figure(figsize=(width_of(spaces), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    parallel(figure.subplots(), spaces, tried, objective)
    figure.savefig(path, dpi=_DPI)
