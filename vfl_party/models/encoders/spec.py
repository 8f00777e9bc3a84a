"""Describes the rows that an encoder will see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """One row, without the batch dimension.

    ``shape``: ``(F,)`` for numeric features, ``(C, H, W)`` for images. ``cardinalities``: the
    number of values of each categorical column; if not empty, the encoder is called as ``encoder(x,
    categories_BK)``.
    """

    shape: tuple[int, ...]
    cardinalities: tuple[int, ...] = ()
