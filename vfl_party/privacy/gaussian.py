"""Gaussian noise on the representations that a passive party sends (FedOnce, Section 5.8 and Table 8)."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor


class GaussianNoise:
    """R + N(0, σ²). The key comes from the operating system, as ``IsoNoise``'s: a peer must not draw the same noise."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._random = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def noise(self, r_ND: Tensor) -> Tensor:
        """r_ND with noise, of its shape, dtype and device, without graph; r_ND itself where σ is 0."""
        if self._sigma == 0:
            return r_ND
        r_ND = r_ND.detach()
        unit = torch.from_numpy(self._random.standard_normal(r_ND.shape, dtype=np.float32)).to(r_ND.device)
        return r_ND + (self._sigma * unit).to(r_ND.dtype)
