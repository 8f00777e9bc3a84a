"""The recipe's settings for the trees. Defaults: LightGBM's, except for the number of trees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import PositiveInt, Rate


class GbdtSettings(Section):
    """Settings of the trees."""

    trees: PositiveInt = 500
    """Rounds of boosting, LightGBM's ``num_iterations``. Each grows a tree, in a multi-class task
    one for each class.
    """
    lr: Rate = 0.1
    """The learning rate."""
    leaves: Annotated[int, Field(ge=2, le=131_072)] = 31
    """The most leaves of a tree, LightGBM's ``num_leaves``."""
    min_rows: PositiveInt = 20
    """The least rows of a leaf, LightGBM's ``min_data_in_leaf``."""
    early_stopping: PositiveInt | None = None
    """Ends after this number of trees without a lower loss on the validation rows, and keeps the
    trees up to the best. Default: off.
    """
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate."""
