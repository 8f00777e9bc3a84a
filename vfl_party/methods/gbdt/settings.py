"""The recipe's settings for boosted trees. The defaults are LightGBM's, except the number of
trees.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import PositiveInt, Rate


class GbdtSettings(Section):
    """Settings of boosted trees at the active party."""

    trees: PositiveInt = 500
    """The number of boosting rounds, LightGBM's ``num_iterations``. Each round grows one tree, or
    one per class in a multi-class task.
    """
    lr: Rate = 0.1
    """The learning rate."""
    leaves: Annotated[int, Field(ge=2, le=131_072)] = 31
    """The maximum number of leaves of a tree, LightGBM's ``num_leaves``."""
    min_rows: PositiveInt = 20
    """The minimum number of rows in a leaf, LightGBM's ``min_data_in_leaf``."""
    early_stopping: PositiveInt | None = None
    """The number of rounds without a lower validation loss after which growth stops. The trees up
    to the best round are kept. Default: off.
    """
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate."""
