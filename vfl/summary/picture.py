"""Helpers to draw with matplotlib without a display: colours, figures, styles and files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vfl_common.errors import Code, InputError
from vfl_common.files import write_error

# Colours that colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#999999"
_DPI = 130


class NotebookFigure(Figure):
    """A figure that any notebook displays as the value of a cell, without ``%matplotlib inline``.

    ``width`` and ``height`` are in inches.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        return file.getvalue()

    def set_heading(self, text: str) -> None:
        """Writes a heading above all panels, aligned to the left."""
        self.suptitle(text, fontsize="medium", x=0.01, ha="left")


def style(axes: Axes, grid: Any = None, spines: tuple[str, ...] = ("top", "right")) -> None:
    """Hides sides of a panel, and draws pale grid lines for the axis ``grid``, if it is given."""
    if grid is not None:
        axes.grid(axis=grid, alpha=0.25)
        axes.set_axisbelow(True)
    axes.spines[list(spines)].set_visible(False)


def style_bars(axes: Axes) -> None:
    """Styles a panel of horizontal bars: small tick labels, and a grid for the x axis."""
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    style(axes, "x", ("top", "right", "left"))


def annotate(axes: Axes, text: str, x: float, y: float, distance: int = 4) -> None:
    """Writes a small text to the right of a point, at a ``distance`` in typographic points."""
    axes.annotate(text, (x, y), (distance, 0), textcoords="offset points", va="center", fontsize=8)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure to a file. Returns ``path``. Raises InputError if it cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise write_error(path, error) from None
    except ValueError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be drawn ({error}). Choose a name ending in .png."
        ) from None
    return path
