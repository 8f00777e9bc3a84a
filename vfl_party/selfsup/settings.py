"""The common settings of self-supervised phases. Defaults: FedHSSL, appendix B."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Probability, Temperature
from vfl_common.config.models import PositiveInt as Width
from vfl_party.selfsup.augment.settings import AugmentSettings

Ssl = Literal["simsiam", "byol", "moco", "simclr"]


class SelfSupSettings(Section):
    """The settings; ``None`` stands for the default of the preset or method: see
    ``vfl_party.selfsup.plan``.
    """

    ssl: Ssl
    rounds: PositiveInt = 40
    batch_size: PositiveInt = Field(default=512, ge=2)
    # Widths of its layers.
    projector: tuple[Width, ...] | None = Field(default=None, min_length=1)
    # Width of its hidden layer; SimSiam and BYOL have one.
    predictor: Width = 128
    # MoCo, SimCLR.
    temperature: Temperature = 0.5
    # MoCo: keys; fewer than the rows, or a row's own keys become negatives.
    queue: PositiveInt = 4096
    # Of the target encoder: BYOL, MoCo.
    momentum: Probability | None = None
    # Default: SGD, its rate by the batch size, with a cosine schedule.
    optimizer: OptimizerSettings | None = None
    augment: AugmentSettings = AugmentSettings()
