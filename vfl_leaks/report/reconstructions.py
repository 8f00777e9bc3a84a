"""Draws private images above their reconstructions as PNG, with matplotlib and no display."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor
from torch.nn import functional

# Maximum number of images in one row.
MAX_IMAGES = 16
_DPI = 130
# Size of the larger side of an image in inches.
_INCHES = 0.72
# Width of the labels left of the images in inches.
_LABELS = 1.45
# Approximate number of pixels of the larger side of an image.
_PIXELS = 96


def draw_pairs(rows: Sequence[tuple[str, Tensor]], title: str) -> bytes:
    """Returns a PNG with rows of images and a title.

    The picture shows the first images of each row. Images with 3 channels are in colour. Other
    images are grey, the mean of their channels.

    Args:
        rows: (name, images [N, C, H, W] with pixels from 0 to 1) of each row.
        title: the title.
    """
    count = min(MAX_IMAGES, min(len(images) for _, images in rows))
    height, width = rows[0][1].shape[2:]
    size = (
        max(_LABELS + _INCHES * width / max(height, width) * count, 6.0),
        0.75 + _INCHES * len(rows),
    )
    figure = Figure(
        figsize=size,
        layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.02, wspace=0.02, hspace=0.02),
    )
    for axes, (name, images) in zip(
        figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True
    ):
        axes.imshow(_join_images(images[:count]), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left")
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _join_images(images: Tensor) -> np.ndarray:
    """Joins images to one wide image, [H, W, 3], because one plot per image is slow."""
    grey = (
        images if images.shape[1] == 3 else images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    )
    factor = max(1, round(_PIXELS / max(images.shape[2:])))
    large = grey.clamp(0, 1).repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    padded = functional.pad(large, (0, _PIXELS // 16), value=1.0)
    strip: np.ndarray = padded.permute(2, 0, 3, 1).flatten(1, 2)[:, : -(_PIXELS // 16)].numpy()
    return strip
