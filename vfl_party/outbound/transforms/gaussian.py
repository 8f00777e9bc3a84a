"""Adds Gaussian noise to the representations that a passive party sends (FedOnce, Section 5.8 and
Table 8).
"""

from __future__ import annotations

from torch import Tensor

from vfl_common.config.base import Section
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter, Positive
from vfl_party.outbound.transforms import Transform


class GaussianSettings(Section):
    """Settings of the transform."""

    sigma: Positive
    """The noise's standard deviation σ."""


class GaussianNoise(NoisyFilter):
    """Sends R + N(0, σ²), with noise from a private generator."""

    def __init__(self, sigma: float) -> None:
        self._sigma, self.text = sigma, f"Gaussian noise (σ = {sigma:g})"
        super().__init__()

    def noise(self, r_ND: Tensor) -> Tensor:
        """Returns r_ND with noise, in the same shape, dtype and device, without a graph; r_ND
        itself if σ is 0.
        """
        if self._sigma == 0:
            return r_ND
        r_ND = r_ND.detach()
        return r_ND + (self._sigma * self._random.like(r_ND)).to(r_ND.dtype)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


TRANSFORM = Transform(GaussianSettings, lambda settings: GaussianNoise(settings.sigma))
