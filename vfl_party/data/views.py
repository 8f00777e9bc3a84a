"""Cuts a whole data set's features to a party's part: runs of columns, quarters or halves of
images.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import ViewSettings
from vfl_party.data.checks import unusable

# Schemes for images.
CUTS = ("quadrants", "halves")


def _run(n: int, part: int, parts: int) -> slice:
    """Returns the ``part``-th of ``parts`` contiguous runs of ``range(n)``, of nearly equal length,
    longer ones first.
    """
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


def column_run(source: str, n: int, view: ViewSettings | None) -> slice:
    """Returns the party's part of ``n`` columns; all unless the scheme is ``columns``. Raises
    InputError if it is empty.
    """
    if view is None or view.scheme != "columns":
        return slice(0, n)
    if n < view.parts:
        raise unusable(
            source,
            f"data.view needs at least {view.parts} feature columns, one a part (got {n}). Use "
            "fewer parts.",
        )
    return _run(n, view.part, view.parts)


def row_run(order: npt.NDArray[np.int64], view: ViewSettings | None) -> npt.NDArray[np.int64]:
    """Returns the party's part of rows, int64, in the order of their ids; all unless the scheme is
    ``rows``.
    """
    return order[view.part :: view.parts] if view is not None and view.scheme == "rows" else order


def cut_images(
    source: str, images_NCHW: npt.NDArray[Any], view: ViewSettings | None
) -> npt.NDArray[Any]:
    """Cuts the party's quarter or half of each image [N, C, H, W]; if a side is odd, its first half
    is longer.

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
    columns = _run(width, view.part % 2, 2)
    rows = _run(height, view.part // 2, 2) if view.scheme == "quadrants" else slice(0, height)
    return images_NCHW[:, :, rows, columns]
