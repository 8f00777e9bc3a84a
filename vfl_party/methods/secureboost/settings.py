"""The recipe's settings for trees that several parties grow jointly, and the exchanges of the
phase. All tensors contain integers or ciphertexts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.bundle import Kind
from vfl_common.config.base import Section
from vfl_party.homomorphic import SCHEMES, Encryption
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, i64, u8

# The maximum number of bins or categories of a column, including the bin for missing values. HEU
# uses seven bits for them.
MAX_CODES = 120
# The maximum depth of a tree: the nodes of its last level and ``SETTLED`` must fit into a byte.
MAX_DEPTH = 7
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class GossSettings(Section):
    """The settings of gradient-based one-side sampling (GOSS)."""

    top: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the training rows that is kept because of the largest gradients."""
    rest: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of the training rows that is drawn at random from the remaining rows."""

    def model_post_init(self, _context: Any) -> None:
        if self.top + self.rest > 1.0:
            raise ValueError(
                f"top = {self.top} and rest = {self.rest} add up to more than all rows. Lower one "
                "of them."
            )


class SecureBoostSettings(Section):
    """Boosted trees by histograms, with XGBoost's second-order gain, grown level by level."""

    trees: PositiveInt = 100
    """The number of boosting rounds. Each round grows one tree, or one per class in a multi-class
    task.
    """
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = 3
    """The maximum depth of a tree."""
    leaves: Annotated[int, Field(ge=2)] | None = None
    """The maximum number of leaves of a tree. In a level, the splits with the largest gain are used
    first. Default: as many as ``depth`` allows.
    """
    bins: Annotated[int, Field(ge=2, le=MAX_CODES - 1)] = 32
    """The number of bins of a numeric column, at quantiles of the party's own training rows."""
    learning_rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The learning rate."""
    lambda_: NotNegative = Field(default=1.0, alias="lambda")
    """The L2 penalty on the values of leaves."""
    min_child_weight: NotNegative = 1.0
    """The minimum sum of second derivatives on each side of a split."""
    min_gain: NotNegative = 0.0
    """The minimum gain: a split must gain more than this."""
    row_sample: Share = 1.0
    """The share of the training rows that a round uses."""
    column_sample: Share = 1.0
    """The share of each party's columns that a round uses."""
    goss: GossSettings | None = None
    """Gradient-based sampling: a round uses the rows with the largest gradients, and a random share
    of the remaining rows. Default: off.
    """
    early_stopping: PositiveInt | None = None
    """The number of rounds without a lower validation loss after which growth stops. The trees up
    to the best round are kept. Default: off.
    """
    first_tree_own: bool = False
    """Whether the first round uses only the active party's columns, so that later gradients reveal
    less about the labels.
    """
    encryption: Encryption = "paillier"
    """How gradients are encrypted: Paillier, Okamoto-Uchiyama (``ou``), or not at all (``none``,
    for trials).
    """
    key_bits: Literal[1024, 2048, 3072, 4096] = 2048
    """The number of bits of the key; 1024 is for trials."""
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
        """A text about how gradients are encrypted, for notes, the summary and the report."""
        if self.encryption == "none":
            return "NOT encrypted"
        return f"encrypted by {SCHEMES[self.encryption]}, {self.key_bits:,} bits"


# The bits of the active party's verdict on a round: it is the best so far, or it is the last.
BEST, STOP = 1, 2
# The maximum number of a party's entries (possible splits) in a tree.
MAX_ENTRIES = 1 << 17
# The length of an ``Offer`` on the wire: the number of numeric columns, the number of their splits,
# and the number of categorical columns for each number of entries.
FACTS = 2 + MAX_CODES + 1
KEY = Exchange(
    "key",
    Sent(Kind.ROWS, {"facts": i64(1 + FACTS)}),
    Sent(Kind.VERDICT, {"key": u8("room")}, label_free=True),
    when="once a generation",
)
PARTITION = Exchange(
    "partition",
    Sent(Kind.ROWS, {"left": u8("packed")}),
    Sent(Kind.ROWS, {"nodes": u8("rows")}),
    when="every level of a tree",
)
SAMPLE = Exchange("sample", NOTHING, Sent(Kind.ROWS, {"sampled": u8("packed")}), when="every round")
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(1)}), when="every round")


def gradients(settings: SecureBoostSettings) -> Exchange:
    """Declares the exchange of gradients: each passive party sends the numbers of its entries, and
    the active party sends g and h of each row. The tensor's name says whether they are encrypted.
    """
    name = "unencrypted" if settings.encryption == "none" else "ciphertexts"
    down = Sent(Kind.GRADIENT, {name: u8("rows", "bytes")}, how=settings.protection)
    return Exchange("gradients", Sent(Kind.ROWS, {"sizes": i64("parts")}), down, when="every tree")


def sums(settings: SecureBoostSettings) -> Exchange:
    """Declares the exchange of sums: each passive party sends the sums for its entries, in an order
    that only the sender knows. The active party returns the chosen entries.

    A ciphertext contains several sums.
    """
    name = "unencrypted" if settings.encryption == "none" else "ciphertexts"
    up = Sent(Kind.GRADIENT, {name: u8("sums", "bytes")}, how=settings.protection)
    return Exchange(
        "sums",
        up,
        Sent(Kind.VERDICT, {"chosen": u8("nodes", "entries")}),
        when="every level of a tree",
    )


def walk(when: str = "after the last tree") -> Exchange:
    """Declares the exchange that moves rows down the trees, one level per step. Each passive party
    sends one bit for each row and tree. The active party sends the nodes that the rows have
    reached.
    """
    up = Sent(Kind.ROWS, {"left": u8("packed")})
    return Exchange(
        "walk", up, Sent(Kind.ROWS, {"nodes": u8("rows", "trees")}), when=f"{when}, every level"
    )
