"""Isotropic Gaussian noise on what a party sends, so that labels are harder to read from it."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
import torch
from torch import Tensor


class IsoNoise:
    """ISO(d) = d + N(0, σ²), σ = amplifier * (the largest L2 norm of d's rows) / √m (FedHSSL, Eq. 7).

    The key comes from the operating system, never from the recipe's seed: a peer could draw the same noise and subtract
    it. It has 128 bits, numpy's Philox; torch's CPU generator takes 32 bits of a seed, few enough to try them all.
    """

    def __init__(self, amplifier: float) -> None:
        self._amplifier = amplifier
        self._random = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def noise(self, d_BM: Tensor) -> Tensor:
        """d with noise, of its shape, dtype and device, without graph; d itself where the amplifier is 0.

        d may have more dimensions, [B, …], with m elements a row, or one, which is then one row.
        """
        if self._amplifier == 0:
            return d_BM
        d_BM = d_BM.detach()
        rows = d_BM.reshape(1, -1) if d_BM.dim() < 2 else d_BM.flatten(1)
        norm: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).max()
        sigma = self._amplifier * norm / math.sqrt(rows.shape[1])
        unit = torch.from_numpy(self._random.standard_normal(d_BM.shape, dtype=np.float32)).to(d_BM.device)
        return d_BM + (sigma * unit).to(d_BM.dtype)

    def state(self) -> dict[str, Any]:
        """All that later noise depends on, for this party's own checkpoints: who knows it can subtract the noise."""
        state = dict(self._random.bit_generator.state)
        counters = {name: array.tolist() for name, array in state["state"].items()}
        return {**state, "state": counters, "buffer": state["buffer"].tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with the noise of the one that gave ``state``."""
        self._random.bit_generator.state = state
