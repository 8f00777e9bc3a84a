"""Selects the part of a data set that a party's view has: columns, rows, or quarters or halves of
images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import ViewSettings
from vfl_party.data.checks import unusable

# The view schemes for images.
CUTS = ("quadrants", "halves")


def _get_slice(n: int, part: int, parts: int) -> slice:
    """Divides ``range(n)`` into ``parts`` contiguous slices of nearly the same length, the longer
    ones first. Returns the slice number ``part``.
    """
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


def column_run(source: str, n: int, view: ViewSettings | None) -> slice:
    """Returns the party's slice of ``n`` columns; all columns unless the scheme is ``columns``.
    Raises InputError if there are too few columns.
    """
    if view is None or view.scheme != "columns":
        return slice(0, n)
    if n < view.parts:
        raise unusable(
            source,
            f"data.view needs at least {view.parts} feature columns, one a part (got {n}). Use "
            "fewer parts.",
        )
    return _get_slice(n, view.part, view.parts)


def row_run(order: npt.NDArray[np.int64], view: ViewSettings | None) -> npt.NDArray[np.int64]:
    """Returns the party's rows, int64, in the same order; all rows unless the scheme is
    ``rows``.
    """
    return order[view.part :: view.parts] if view is not None and view.scheme == "rows" else order


def cut_images(
    source: str, images_NCHW: npt.NDArray[Any], view: ViewSettings | None
) -> npt.NDArray[Any]:
    """Returns the party's quarter or half of each image [N, C, H, W]. If a side is odd, its first
    half is longer.

    Raises InputError if a side is a single pixel.
    """
    if view is None or view.scheme not in CUTS:
        return images_NCHW
    height, width = images_NCHW.shape[2:]
    if width < 2 or (view.scheme == "quadrants" and height < 2):
        raise unusable(
            source,
            f"images of {height} x {width} pixels cannot be divided into {view.scheme}. Use larger "
            "images, or another data.view.",
        )
    columns = _get_slice(width, view.part % 2, 2)
    rows = _get_slice(height, view.part // 2, 2) if view.scheme == "quadrants" else slice(0, height)
    return images_NCHW[:, :, rows, columns]
