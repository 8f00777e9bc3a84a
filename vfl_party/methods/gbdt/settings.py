"""The recipe's settings for the trees. Defaults: LightGBM's, except for the number of trees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import PositiveInt, Rate


class GbdtSettings(Section):
    """Settings of the trees.

    ``early_stopping``: ends when the loss on the validation rows has not fallen for this number of
    trees, and keeps the trees up to the best; ``splits``: the splits to evaluate, as in
    ``evaluate``.
    """

    # Rounds of boosting; each grows one tree, or in a multi-class task one for each class.
    trees: PositiveInt = 500
    lr: Rate = 0.1
    # Of a tree.
    leaves: Annotated[int, Field(ge=2, le=131_072)] = 31
    # Of a leaf.
    min_rows: PositiveInt = 20
    early_stopping: PositiveInt | None = None
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
