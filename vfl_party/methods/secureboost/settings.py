"""The recipe's settings for trees between parties."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_party.methods.secureboost.homomorphic import SCHEMES, Encryption

# Bins or categories of a column, with the missing one: HEU numbers them in seven bits.
MOST_CODES = 120
# A node's number in its level, and one more, fit into a byte.
MOST_DEPTH = 7
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class GossSettings(Section):
    """Gradient-based one-side sampling. ``top``: the share kept for its gradients; ``rest``: the
    share drawn.
    """

    top: Annotated[float, Field(gt=0, lt=1)] = 0.2
    rest: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def model_post_init(self, _context: Any) -> None:
        if self.top + self.rest > 1.0:
            raise ValueError(
                f"top = {self.top} and rest = {self.rest} are more than all rows; lower one"
            )


class SecureBoostSettings(Section):
    """Gradient-boosted trees by histograms, with XGBoost's second-order gain, grown level by level.

    ``trees``: rounds; each grows one tree, or in a multi-class task one for each class. ``leaves``:
    of a tree; None: as many as ``depth`` gives. ``bins``: of a column, quantiles of the party's own
    training rows. ``lambda``: on the squares of the leaves. ``min_child_weight``: the least sum of
    h of a child. ``min_gain``: a split must have more. ``row_sample``, ``column_sample``: the share
    that a round's trees see. ``goss``: they see the rows with the largest gradients, and some of
    the others. ``early_stopping``: ends when the loss on the validation rows has not fallen for
    this number of rounds, and keeps the trees up to the best. ``first_tree_own``: the first round
    uses the active party's columns alone (the paper's completely secure mode). ``encryption``: of
    gradients: ``paillier``, ``ou`` (Okamoto-Uchiyama) or ``none``, a rehearsal in which the passive
    parties may read them. ``key_bits``: of the key. ``splits``: the splits to evaluate, as in
    ``evaluate``.
    """

    trees: PositiveInt = 100
    depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = 3
    leaves: Annotated[int, Field(ge=2)] | None = None
    bins: Annotated[int, Field(ge=2, le=MOST_CODES - 1)] = 32
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    lambda_: NotNegative = Field(default=1.0, alias="lambda")
    min_child_weight: NotNegative = 1.0
    min_gain: NotNegative = 0.0
    row_sample: Share = 1.0
    column_sample: Share = 1.0
    goss: GossSettings | None = None
    early_stopping: PositiveInt | None = None
    first_tree_own: bool = False
    encryption: Encryption = "paillier"
    key_bits: Literal[1024, 2048, 3072, 4096] = 2048
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")

    def model_post_init(self, _context: Any) -> None:
        if self.leaves is not None and self.leaves > 1 << self.depth:
            raise ValueError(
                f"a tree of depth {self.depth} has at most {1 << self.depth} leaves; lower leaves"
            )
        if self.goss is not None and self.row_sample < 1.0:
            raise ValueError("goss and row_sample both choose the rows of a round; remove one")

    @property
    def protection(self) -> str:
        """Says how gradients are encrypted: in notes, in the summary and in the report."""
        if self.encryption == "none":
            return "NOT encrypted"
        return f"encrypted by {SCHEMES[self.encryption]}, {self.key_bits:,} bits"
