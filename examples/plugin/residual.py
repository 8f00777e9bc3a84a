"""An encoder: fully connected layers, each of which adds to what came in."""

from __future__ import annotations

import math

from pydantic import PositiveInt
from torch import Tensor, nn

from vfl.api import Encoder, InputSpec, Section


class ResidualSettings(Section):
    """The encoder's keys besides kind."""

    width: PositiveInt = 64
    depth: PositiveInt = 2


class Residual(nn.Module):
    # What FedHSSL averages.
    top_layers = ("last",)

    def __init__(self, settings: ResidualSettings, spec: InputSpec, embedding_size: int) -> None:
        super().__init__()
        width = settings.width
        self.first = nn.Linear(math.prod(spec.shape), width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(settings.depth))
        self.last = nn.Linear(width, embedding_size)

    def forward(self, x_BF: Tensor) -> Tensor:
        h_BW = self.first(x_BF.flatten(1))
        for block in self.blocks:
            h_BW = h_BW + block(h_BW).relu()
        z_BD: Tensor = self.last(h_BW)
        return z_BD


ENCODER = Encoder(ResidualSettings, Residual)
