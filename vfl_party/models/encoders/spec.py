"""Describes the rows that an encoder will see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """One row, without the batch dimension.

    ``shape``: ``(F,)`` for numeric features, ``(C, H, W)`` for images. ``cardinalities``: the
    number of codes of each categorical column; if not empty, the encoder is called as ``encoder(x,
    categories_BK)``. Code 0 is a category that training did not have, 1 a missing one, 2 one that
    augmentation hides.
    """

    shape: tuple[int, ...]
    cardinalities: tuple[int, ...] = ()
