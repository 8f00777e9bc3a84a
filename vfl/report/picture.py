"""A matplotlib figure that displays itself in a notebook."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class NotebookFigure(Figure):
    """A figure that any notebook displays as the value of a cell, without ``%matplotlib
    inline``.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        return file.getvalue()
