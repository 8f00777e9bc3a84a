"""A figure that shows itself in a notebook. Imports matplotlib, without a display."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that any notebook shows as its cell's value, without ``%matplotlib inline``
    before.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        return file.getvalue()
