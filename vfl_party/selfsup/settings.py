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
    """The settings; ``None`` stands for the default of the preset or method: see ``vfl_party.selfsup.plan``."""

    ssl: Ssl
    rounds: PositiveInt = 40
    batch_size: PositiveInt = Field(default=512, ge=2)
    projector: tuple[Width, ...] | None = Field(default=None, min_length=1)  # widths of its layers
    predictor: Width = 128  # width of its hidden layer; SimSiam and BYOL have one
    temperature: Temperature = 0.5  # MoCo, SimCLR
    queue: PositiveInt = 4096  # MoCo: keys; fewer than the rows, or a row's own keys become negatives
    momentum: Probability | None = None  # of the target encoder: BYOL, MoCo
    optimizer: OptimizerSettings | None = None  # default: SGD, its rate by the batch size, with a cosine schedule
    augment: AugmentSettings = AugmentSettings()
