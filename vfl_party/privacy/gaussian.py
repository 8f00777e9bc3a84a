"""Adds Gaussian noise to the representations that a passive party sends (FedOnce, Section 5.8 and Table 8)."""

from __future__ import annotations

from torch import Tensor

from vfl_party.privacy.generator import PrivateGaussian


class GaussianNoise:
    """R + N(0, σ²), from a private generator."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._random = PrivateGaussian()

    def noise(self, r_ND: Tensor) -> Tensor:
        """Returns r_ND with noise: same shape, dtype and device, no graph; r_ND itself if σ is 0."""
        if self._sigma == 0:
            return r_ND
        r_ND = r_ND.detach()
        return r_ND + (self._sigma * self._random.like(r_ND)).to(r_ND.dtype)
