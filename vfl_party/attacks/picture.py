"""Draws private images over their reconstructions, as PNG. Imports matplotlib, without a display."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

MOST_SHOWN = 16  # images, in one row
_DPI = 130
_INCHES = 0.72  # of an image's larger side
_LABELS = 1.45  # inches, left of the images


def draw_pairs(rows: Sequence[tuple[str, Tensor]], title: str) -> bytes:
    """Returns a PNG: a row of images for each of ``rows`` (its name, images [N, C, H, W] from 0 to 1), and a title.

    It shows the first images of each row. Images of 3 channels are in colour, all others in grey, by their mean.
    """
    count = min(MOST_SHOWN, min(len(images) for _, images in rows))
    height, width = rows[0][1].shape[2:]
    size = (max(_LABELS + _INCHES * width / max(height, width) * count, 6.0), 0.75 + _INCHES * len(rows))
    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.02, wspace=0.02, hspace=0.02)
    figure = Figure(figsize=size, layout=layout)
    grid = figure.subplots(len(rows), count, squeeze=False)
    for axes_row, (name, images) in zip(grid, rows, strict=True):
        for axes, image in zip(axes_row, images[:count], strict=True):
            pixels = image.permute(1, 2, 0) if len(image) == 3 else image.mean(dim=0)
            axes.imshow(pixels.numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
        axes_row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left")
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()
