"""The recipe's settings for MocoSFL. Defaults: MocoSFL, appendix A.1 and A.4."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Probability, Temperature
from vfl_common.config.models import PositiveInt as Width
from vfl_party.methods.mocosfl.resist import ResistSettings
from vfl_party.models.halves import Bottleneck
from vfl_party.selfsup.augment.settings import AugmentSettings

_MOST_PIXELS = 1 << 26
# Of keys.
_MOST_BYTES = 64 << 30
# Of the tail; appendix A.1, and A.4 for a bottom that is not trained.
_RATE, _FROZEN_RATE = 0.06, 0.001


class BottleneckSettings(Section):
    """TAResSFL's bottleneck at the cut: C4S2 is ``channels = 4, stride = 2``."""

    channels: Annotated[int, Field(gt=0, le=4096)] = 4
    stride: Annotated[int, Field(ge=1, le=8)] = 2

    def __str__(self) -> str:
        return f"C{self.channels}S{self.stride}"


class MocoSFLSettings(Section):
    """A step is one batch of ``batch_size`` rows at each passive party; a round ends with an
    average of the bottoms.

    An epoch has as many steps as the party with most rows has full batches; a party with fewer
    begins its rows again.

    ``image``: channels, height and width of a row, which the active party needs to know. ``cut``:
    the convolutions of the bottom (MocoSFL-1, MocoSFL-3). ``averages_per_epoch``: how often the
    server averages the bottoms. ``queue``: keys of all parties together. ``momentum``: of the
    moving averages of bottoms and tail. ``width``: of the head. ``frozen``: the bottoms are not
    trained: no gradient goes back, and nothing is averaged (TAResSFL's transfer step). ``resist``:
    a party that trains both halves alone makes its bottom hard to invert (TAResSFL's pretraining
    step). ``bottom_optimizer``: each of K parties gets its rows' part of the gradient of one mean
    loss, so that averaged bottoms move 1/K as far as in one process with the same learning rate; K
    times the rate makes up for that. The released code has a rate of its own for clients, too
    (``c_lr``).
    """

    epochs: PositiveInt = 200
    # Of each party; MocoSFL keeps about 100 over all of them.
    batch_size: PositiveInt = 20
    averages_per_epoch: PositiveInt = 1
    image: tuple[Width, Width, Width] = (3, 32, 32)
    cut: Width = 3
    bottleneck: BottleneckSettings | None = None
    queue: Annotated[int, Field(gt=0, le=10_000_000)] = 6000
    temperature: Temperature = 0.1
    momentum: Probability = 0.99
    width: Annotated[int, Field(gt=0, le=16_384)] = 1024
    frozen: bool = False
    resist: ResistSettings | None = None
    # Of bottoms and tail.
    optimizer: OptimizerSettings | None = None
    # Of the bottoms, if it is another.
    bottom_optimizer: OptimizerSettings | None = None
    augment: AugmentSettings = AugmentSettings()

    def model_post_init(self, _context: Any) -> None:
        if self.frozen and "averages_per_epoch" in self.model_fields_set:
            raise ValueError(
                "frozen = true leaves the bottoms as they are: remove averages_per_epoch"
            )
        if self.frozen and self.bottom_optimizer is not None:
            raise ValueError(
                "frozen = true leaves the bottoms as they are: remove bottom_optimizer"
            )
        if math.prod(self.image) > _MOST_PIXELS:
            raise ValueError(f"image has more than {_MOST_PIXELS:,} numbers; correct it")
        if 4 * self.queue * self.width > _MOST_BYTES:
            text = (
                f"queue = {self.queue:,} keys of width = {self.width:,} are more than "
                f"{_MOST_BYTES >> 30} GiB"
            )
            raise ValueError(f"{text}; take fewer, or narrower ones")
        if self.resist is not None and (self.frozen or self.batch_size < 2):
            raise ValueError(
                "resist trains the bottom, on two rows or more: remove frozen, or enlarge "
                "batch_size"
            )

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
