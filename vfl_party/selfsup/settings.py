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
    """The settings; ``None`` stands for the default of the preset or method: see
    ``vfl_party.selfsup.plan``.
    """

    ssl: Ssl
    """The self-supervised loss."""
    rounds: PositiveInt = 40
    """Rounds of the phase."""
    batch_size: PositiveInt = Field(default=512, ge=2)
    """Rows of a batch."""
    projector: tuple[Width, ...] | None = None
    """The widths of the projector's layers; ``[]``: none, the loss sees the embeddings themselves
    (SS-VFL, Eq. 2). Default: the method's, by preset.
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
    """``moco``: how many keys are kept; fewer than the rows, or a row's own keys become negatives.
    """
    momentum: Probability | None = None
    """How much the target encoder keeps of its weights in each step (``byol``, ``moco``). Default:
    the method's, by preset.
    """
    optimizer: UnjudgedOptimizer | None = None
    """The optimizer. Default: SGD with a cosine schedule and a learning rate by the batch size."""
    augment: AugmentSettings = AugmentSettings()
    """How the two views of a row are made."""
