"""Clips each row that a party sends and adds Gaussian noise that is (ε, δ)-differentially private
for one row of one message.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.config.models import Norm
from vfl_party.base.mechanism import Mechanism
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter
from vfl_party.outbound.transforms import Transform


class ClippedGaussianSettings(Section):
    """Settings of the transform."""

    clip: Norm
    """The maximum L2 norm of a row; a longer row is scaled down to it."""
    epsilon: Annotated[float, Field(ge=1e-3, le=1e4)]
    """ε of one message, for one row."""
    delta: Annotated[float, Field(ge=1e-12, lt=0.5)]
    """δ of one message, for one row."""


def sigma_of(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the smallest σ of Gaussian noise that is (ε, δ)-differentially private (Balle and
    Wang 2018, Theorem 8): Φ(Δ/2σ − εσ/Δ) − e^ε·Φ(−Δ/2σ − εσ/Δ) <= δ.
    """

    from scipy.special import log_ndtr, ndtr

    # The ratio is σ / Δ.
    def is_private(ratio: float) -> bool:
        a, b = 0.5 / ratio, epsilon * ratio
        return float(ndtr(a - b) - math.exp(min(700.0, epsilon + float(log_ndtr(-a - b))))) <= delta

    low, high = 1e-6, 1.0
    while not is_private(high):
        high *= 2
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_private(middle) else (middle, high)
    return high * sensitivity


class ClippedGaussian(NoisyFilter):
    """Sends z·min(1, C/‖z‖) + N(0, σ²). A changed row moves by at most 2C, and σ follows from (ε,
    δ).

    The guarantee is for one message. E epochs send each row E times, and validation and evaluation
    send it again. The gradient that comes back is used as the gradient of the row before clipping.
    Noise is drawn in float32.
    """

    def __init__(self, settings: ClippedGaussianSettings) -> None:
        self._clip = settings.clip
        self._sigma = sigma_of(settings.epsilon, settings.delta, 2 * settings.clip)
        self.costs = Mechanism("gaussian", self._sigma / (2 * settings.clip))
        privacy = f"ε = {settings.epsilon:g}, δ = {settings.delta:g} a message"
        self.text = f"clip to {settings.clip:g}, Gaussian noise (σ = {self._sigma:.3g}: {privacy})"
        super().__init__()

    def noise(self, z_BD: Tensor) -> Tensor:
        """Returns z, clipped and with noise, with its shape, dtype and device, without a graph."""
        rows = z_BD.detach().flatten(1)
        norm_B = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
        clipped = rows * (self._clip / norm_B.clamp_min(self._clip)).to(rows.dtype)
        noisy: Tensor = clipped + (self._sigma * self._random.like(rows)).to(rows.dtype)
        return noisy.view_as(z_BD)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


TRANSFORM = Transform(ClippedGaussianSettings, ClippedGaussian, of_row=True)
