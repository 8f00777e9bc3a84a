"""The recipe's settings for trees between parties."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_party.homomorphic import SCHEMES, Encryption

# The most bins or categories of a column, including the missing one: HEU uses seven bits.
MAX_CODES = 120
# A node's number in its level, and one more, fit into a byte.
MAX_DEPTH = 7
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class GossSettings(Section):
    """Gradient-based one-side sampling."""

    top: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the training rows that is kept, those with the largest gradients."""
    rest: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of the training rows that is drawn from the others."""

    def model_post_init(self, _context: Any) -> None:
        if self.top + self.rest > 1.0:
            raise ValueError(
                f"top = {self.top} and rest = {self.rest} add up to more than all rows. Lower one "
                "of them."
            )


class SecureBoostSettings(Section):
    """Boosted trees by histograms, with XGBoost's second-order gain, grown level by level."""

    trees: PositiveInt = 100
    """Rounds of boosting. Each grows a tree, in a multi-class task one for each class."""
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = 3
    """The depth of a tree."""
    leaves: Annotated[int, Field(ge=2)] | None = None
    """The most leaves of a tree; the splits with the most gain of a level come first. Default: as
    many as ``depth`` gives.
    """
    bins: Annotated[int, Field(ge=2, le=MAX_CODES - 1)] = 32
    """Bins of a column of numbers, at quantiles of the party's own training rows."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The learning rate."""
    lambda_: NotNegative = Field(default=1.0, alias="lambda")
    """The penalty on the squares of the leaves."""
    min_child_weight: NotNegative = 1.0
    """The least sum of second derivatives on either side of a split."""
    min_gain: NotNegative = 0.0
    """A split must gain more than this."""
    row_sample: Share = 1.0
    """The share of the training rows that a round sees."""
    column_sample: Share = 1.0
    """The share of each party's columns that a round sees."""
    goss: GossSettings | None = None
    """A round sees the rows with the largest gradients, and some of the others. Default: off."""
    early_stopping: PositiveInt | None = None
    """Ends after this number of rounds without a lower loss on the validation rows, and keeps the
    trees up to the best. Default: off.
    """
    first_tree_own: bool = False
    """Whether the first round uses the active party's columns alone, so that later gradients tell
    less of the labels.
    """
    encryption: Encryption = "paillier"
    """How gradients are encrypted: Paillier, Okamoto-Uchiyama (``ou``), or not at all (``none``,
    for trials).
    """
    key_bits: Literal[1024, 2048, 3072, 4096] = 2048
    """Bits of the key; 1024 is for trials."""
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate after the last tree."""

    def model_post_init(self, _context: Any) -> None:
        if self.leaves is not None and self.leaves > 1 << self.depth:
            raise ValueError(
                f"leaves must be at most {1 << self.depth} for depth = {self.depth} (got "
                f"{self.leaves}). Lower leaves."
            )
        if self.goss is not None and self.row_sample < 1.0:
            raise ValueError(
                "goss and row_sample both choose the rows of a round. Remove one of them."
            )

    @property
    def protection(self) -> str:
        """How gradients are encrypted, for notes, the summary and the report."""
        if self.encryption == "none":
            return "NOT encrypted"
        return f"encrypted by {SCHEMES[self.encryption]}, {self.key_bits:,} bits"
