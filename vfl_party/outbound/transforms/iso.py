"""Adds isotropic Gaussian noise to the tensors that a party sends, so that they reveal less about
labels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_common.config.base import Section
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter, Positive
from vfl_party.outbound.transforms import Transform


class IsoSettings(Section):
    """Settings of the transform."""

    amplifier: Positive
    """λ, the factor of the noise, which is proportional to the largest norm of a row."""


class IsoNoise(NoisyFilter):
    """ISO(d) = d + N(0, σ²), σ = amplifier * (the largest L2 norm of d's rows) / √m (FedHSSL, Eq.
    7).
    """

    def __init__(self, amplifier: float) -> None:
        self._amplifier, self.text = amplifier, f"iso noise (λ = {amplifier:g})"
        super().__init__()

    def noise(self, d_BM: Tensor) -> Tensor:
        """Returns d with noise, in the same shape, dtype and device, without a graph; d itself if
        the amplifier is 0.

        d may have more dimensions, [B, …], with m elements per row. A d of one dimension is one
        row.
        """
        if self._amplifier == 0:
            return d_BM
        d_BM = d_BM.detach()
        rows = d_BM.reshape(1, -1) if d_BM.dim() < 2 else d_BM.flatten(1)
        norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).max()
        sigma = self._amplifier * norm / math.sqrt(rows.shape[1])
        noisy: Tensor = d_BM + (sigma * self._random.like(d_BM)).to(d_BM.dtype)
        return noisy

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


TRANSFORM = Transform(IsoSettings, lambda settings: IsoNoise(settings.amplifier), of_batch=True)
