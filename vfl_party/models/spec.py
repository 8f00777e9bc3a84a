"""What an encoder is told about the rows that it will see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """One row, without the batch dimension.

    ``shape``: ``(F,)`` for numeric features, ``(C, H, W)`` for images. ``cardinalities``: how many values each
    categorical column takes; not empty when the encoder is called as ``encoder(x, categories_BK)``.
    """

    shape: tuple[int, ...]
    cardinalities: tuple[int, ...] = ()
