"""Describes the rows that an encoder takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """The shape of one input row, without the batch dimension.

    Args:
        shape: ``(F,)`` for numeric features, ``(C, H, W)`` for images.
        cardinalities: The number of codes of each categorical column. If it is not empty, call the
            encoder as ``encoder(x, categories_BK)``. Code 0 is a category that did not occur in
            training, 1 a missing value, and 2 a value that augmentation masked.
    """

    shape: tuple[int, ...]
    cardinalities: tuple[int, ...] = ()
