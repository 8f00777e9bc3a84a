"""The part of a data set that a party holds in an experiment."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from vfl_common.config.base import Section


class ViewSettings(Section):
    """The part of a data set that this party holds, for experiments in which one file has all of
    it. An image party with an ``mlp`` encoder sees its part flattened.
    """

    scheme: Literal["columns", "quadrants", "halves", "rows"]
    """How the source is divided: ``columns`` (runs of neighbouring columns, as equal as possible),
    ``quadrants`` (quarters of an image: top left, top right, bottom left, bottom right), ``halves``
    (left and right half of an image), ``rows`` (every ``parts``-th row, whole).
    """
    part: NonNegativeInt
    """The number of this party's part, from 0."""
    parts: PositiveInt
    """How many parts there are; 4 for ``quadrants``, 2 for ``halves``."""

    def model_post_init(self, _context: Any) -> None:
        if self.scheme == "quadrants" and self.parts != 4:
            raise ValueError("quadrants has parts = 4")
        if self.scheme == "halves" and self.parts != 2:
            raise ValueError("halves has parts = 2")
        if self.part >= self.parts:
            raise ValueError(
                f"part {self.part} of {self.parts}: give a part from 0 to {self.parts - 1}"
            )
