"""The recipe's settings for MocoSFL. Defaults: MocoSFL, appendix A.1 and A.4."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Probability, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width
from vfl_party.methods.mocosfl.resist import ResistSettings
from vfl_party.models.halves import Bottleneck
from vfl_party.selfsup.augment.settings import AugmentSettings

_MAX_PIXELS = 1 << 26
# The most bytes of all keys.
_MAX_BYTES = 64 << 30
# The released code aims at this many rows of all parties in a step, and between two averages.
_ROWS_A_STEP, _ROWS_AN_AVERAGE = 100, 1000
# The smallest crops in the released code, and the share of blurred images in both papers.
_SMALLEST, _BLURRED = 0.08, 0.5
# Learning rates of the tail: appendix A.1, and A.4 for a bottom model that is not trained.
_RATE, _FROZEN_RATE = 0.06, 0.001


class BottleneckSettings(Section):
    """TAResSFL's bottleneck at the cut: C4S2 is ``channels = 4, stride = 2``."""

    channels: Annotated[int, Field(gt=0, le=4096)] = 4
    """The channels that cross the cut."""
    stride: Annotated[int, Field(ge=1, le=8)] = 2
    """The stride that narrows height and width at the cut."""

    def __str__(self) -> str:
        return f"C{self.channels}S{self.stride}"


class MocoSFLSettings(Section):
    """A step is one batch of ``batch_size`` rows at each passive party; a round ends with an
    average of the bottoms.

    A party with fewer rows than the largest begins its rows again within an epoch. Each of K
    parties gets its rows' part of the gradient of one mean loss, so averaged bottoms move 1/K as
    far as in one process with the same learning rate. K times the rate in ``bottom_optimizer``
    makes up for that; the released code has a rate for clients, too (``c_lr``).
    """

    epochs: PositiveInt = 200
    """Epochs; one has as many steps as the party with most rows has full batches."""
    batch_size: PositiveInt = 20
    """Rows of a batch at each passive party."""
    averages_per_epoch: PositiveInt = 1
    """How often in an epoch the server averages the bottoms. Each time is a round."""
    sample: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """The share of the passive parties that take part in an epoch; others are drawn for the next
    one. One party at least is drawn.
    """
    auto_adjust: bool = False
    """Whether ``batch_size``, ``averages_per_epoch`` and ``sample``, where they are not written,
    follow from the number of passive parties, as in the released code.
    """
    image: tuple[Width, Width, Width] = (3, 32, 32)
    """Channels, height and width of a row, because the active party has no images."""
    cut: Width = 3
    """The convolutions of the bottom (MocoSFL-1, MocoSFL-3)."""
    bottleneck: BottleneckSettings | None = None
    """A narrow layer at the cut (TAResSFL). Default: none."""
    queue: Annotated[int, Field(gt=0, le=10_000_000)] = 6000
    """Keys of all parties together; fewer than the rows, or a row's own keys become negatives."""
    shared_memory: bool = True
    """Whether all parties' rows have all keys as negatives; else each party's rows have those of
    the same party, a part of ``queue`` (MocoSFL, Fig. 12).
    """
    temperature: Temperature = 0.1
    """The number by which cosines are divided."""
    momentum: Probability = 0.99
    """How much the moving averages of bottoms and tail keep in each step."""
    width: Annotated[int, Field(gt=0, le=16_384)] = 1024
    """The width of the two layers above the features, which only pretraining has."""
    frozen: bool = False
    """Whether the bottoms stay as they are, without gradient and average (TAResSFL's transfer)."""
    resist: ResistSettings | None = None
    """Resistance to inversion, learnt by a party that is alone. Default: none."""
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer of bottoms and tail. Default: SGD, 0.06, momentum 0.9, weight decay 5e-4,
    cosine; with ``frozen`` 0.001.
    """
    bottom_optimizer: UnjudgedOptimizer | None = None
    """The optimizer of the bottoms. Default: ``optimizer``."""
    augment: AugmentSettings = AugmentSettings()
    """How a view of a row is made. Default: half of all images are blurred; with ``preset =
    "released"`` crops have 0.08 of an image or more.
    """
    query: Literal["raw", "view"] | None = None
    """What the bottom sees, while its moving average sees one view of a row: the row as it is, or
    another view of it. Default: ``raw`` with ``preset = "paper"``, else ``view``.
    """

    def model_post_init(self, _context: Any) -> None:
        if self.frozen and "averages_per_epoch" in self.model_fields_set:
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove averages_per_epoch."
            )
        if self.frozen and (self.sample < 1.0 or self.auto_adjust):
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove sample and auto_adjust."
            )
        if self.frozen and self.bottom_optimizer is not None:
            raise ValueError(
                "frozen = true leaves the bottom models unchanged. Remove bottom_optimizer."
            )
        if math.prod(self.image) > _MAX_PIXELS:
            raise ValueError(
                f"image must have at most {_MAX_PIXELS:,} numbers (got "
                f"{math.prod(self.image):,}). Correct image."
            )
        if 4 * self.queue * self.width > _MAX_BYTES:
            raise ValueError(
                f"queue = {self.queue:,} keys of width = {self.width:,} need more than "
                f"{_MAX_BYTES >> 30} GiB. Lower queue or width."
            )
        if self.resist is not None and (self.frozen or self.batch_size < 2):
            raise ValueError(
                "resist trains the bottom model on batches of at least 2 rows. Remove frozen, or "
                "increase batch_size."
            )

    def adjust(self, parties: int) -> MocoSFLSettings:
        """Returns the settings for this number of passive parties: ``auto_adjust`` of the released
        code, which keeps about 100 rows in a step, and averages after about 1,000.
        """
        if not self.auto_adjust or not parties:
            return self
        batch = max(1, _ROWS_A_STEP // parties)
        adjusted = {
            "batch_size": batch,
            "averages_per_epoch": max(1, _ROWS_AN_AVERAGE // (batch * parties)),
            "sample": 1 / max(1, parties // _ROWS_A_STEP),
        }
        written = self.model_fields_set
        return self.model_copy(update={k: v for k, v in adjusted.items() if k not in written})

    def views(self, preset: Literal["paper", "released"]) -> tuple[AugmentSettings, bool]:
        """Returns how a view is made, and whether the bottom sees rows as they are."""
        defaults: dict[str, Any] = {"blur": _BLURRED}
        if preset == "released":
            defaults["crop_scale"] = (_SMALLEST, self.augment.crop_scale[1])
        written = self.augment.model_fields_set
        augment = self.augment.model_copy(
            update={key: value for key, value in defaults.items() if key not in written}
        )
        query = self.query or ("raw" if preset == "paper" else "view")
        return augment, query == "raw"

    @property
    def neck(self) -> Bottleneck | None:
        """The bottleneck at the cut."""
        return (
            Bottleneck(self.bottleneck.channels, self.bottleneck.stride)
            if self.bottleneck is not None
            else None
        )

    @property
    def rounds(self) -> int:
        """How many rounds the phase has."""
        return self.epochs * self.averages_per_epoch

    @property
    def of_bottoms(self) -> OptimizerSettings:
        """The optimizer of the bottoms."""
        return self.bottom_optimizer if self.bottom_optimizer is not None else self.of_tail

    @property
    def of_tail(self) -> OptimizerSettings:
        """The optimizer of the tail."""
        if self.optimizer is not None:
            return self.optimizer
        rate = _FROZEN_RATE if self.frozen else _RATE
        return OptimizerSettings(
            kind="sgd", lr=rate, momentum=0.9, weight_decay=5e-4, schedule="cosine"
        )
