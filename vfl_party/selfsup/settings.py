"""The common settings of self-supervised phases. Defaults: FedHSSL, appendix B."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from vfl_common.config.models import PositiveInt as Width
from vfl_common.config.models import Probability, Temperature, UnjudgedOptimizer
from vfl_party.models.training import OwnOptimizers
from vfl_party.selfsup.augment.settings import AugmentSettings

Ssl = Literal["simsiam", "byol", "moco", "simclr"]


class SelfSupSettings(OwnOptimizers):
    """The settings of a self-supervised phase. ``None`` stands for the default of the preset or
    method; see ``vfl_party.selfsup.plan``.
    """

    ssl: Ssl
    """The self-supervised loss."""
    rounds: PositiveInt = 40
    """The number of rounds."""
    batch_size: PositiveInt = Field(default=512, ge=2)
    """The number of rows in a batch."""
    projector: tuple[Width, ...] | None = None
    """The widths of the projector's layers. With ``[]`` there is no projector, and the loss uses
    the embeddings themselves (SS-VFL, Eq. 2). Default: from the method and the preset.
    """
    predictor: Width = 128
    """The width of the predictor's hidden layer (``simsiam``, ``byol``)."""
    anneal_predictor: bool | None = None
    """Whether the predictor's learning rate follows the optimizer's schedule (``simsiam``,
    ``byol``). If not, it stays at ``lr``. Default: true, with preset ``released`` false.
    """
    temperature: Temperature = 0.5
    """The number by which cosines are divided (``moco``, ``simclr``)."""
    queue: PositiveInt = 4096
    """``moco``: the number of keys in the queue. It must be less than the number of rows, or a
    row's own keys become negatives.
    """
    momentum: Probability | None = None
    """The share of its weights that the target encoder keeps in each step (``byol``, ``moco``).
    Default: from the method and the preset.
    """
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer. Default: SGD with a cosine schedule and a learning rate that depends on the
    batch size.
    """
    augment: AugmentSettings = AugmentSettings()
    """The settings for the two views of a row."""
