"""The part of a data set that a party holds in an experiment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from vfl_common.config.base import Section


class ViewSettings(Section):
    """The part of a data set that this party holds, for experiments in which one file holds the
    data of all parties. An ``mlp`` encoder gets its part of an image flattened.
    """

    scheme: Literal["columns", "quadrants", "halves", "rows"]
    """How the source is divided: ``columns`` (contiguous blocks of columns, as equal as possible),
    ``quadrants`` (quarters of an image: top left, top right, bottom left, bottom right), ``halves``
    (left and right half of an image), ``rows`` (every ``parts``-th row, with all columns).
    """
    part: NonNegativeInt
    """The number of this party's part, from 0."""
    parts: PositiveInt
    """The number of parts; 4 for ``quadrants``, 2 for ``halves``."""

    def model_post_init(self, _context: Any) -> None:
        if self.scheme == "quadrants" and self.parts != 4:
            raise ValueError("scheme = 'quadrants' needs parts = 4. Correct parts.")
        if self.scheme == "halves" and self.parts != 2:
            raise ValueError("scheme = 'halves' needs parts = 2. Correct parts.")
        if self.part >= self.parts:
            raise ValueError(
                f"part must be from 0 to {self.parts - 1} (got {self.part}). Correct it."
            )
