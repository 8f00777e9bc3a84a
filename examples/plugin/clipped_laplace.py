"""A transform: clips each row's L1 norm and adds Laplace noise, which hides each row with
ε-differential privacy.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from vfl.api import NoisyFilter, Section, Tensors, Transform


class LaplaceSettings(Section):
    """``clip``: the largest L1 norm of a row. ``epsilon``: ε of one message, for one row."""

    clip: Annotated[float, Field(gt=0.0)]
    epsilon: Annotated[float, Field(gt=0.0)]


class ClippedLaplace(NoisyFilter):
    def __init__(self, settings: LaplaceSettings) -> None:
        # Makes self.random, whose key comes from the operating system.
        super().__init__()
        # Two rows are at most 2·clip apart.
        self._clip, self._scale = settings.clip, 2 * settings.clip / settings.epsilon
        self.text = (
            f"L1 norm clipped to {settings.clip:g}, Laplace noise (ε = {settings.epsilon:g} a "
            "message)"
        )

    def noise(self, z_BD: Tensor) -> Tensor:
        norm_B1 = z_BD.abs().sum(dim=1, keepdim=True)
        clipped_BD = z_BD * (self._clip / norm_B1.clamp_min(self._clip))
        return clipped_BD + self._scale * self.random.laplace_like(z_BD)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x.detach()) for name, x in tensors.items()}


TRANSFORM = Transform(LaplaceSettings, ClippedLaplace, of_row=True)
