"""Draws noise that no peer can reproduce."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vfl_party.outbound.filter import Filter

# The noise of a transform is positive: a recipe asks for it.
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
# The amplifier of noise in a recipe may be 0.
Amplifier = Annotated[float, Field(ge=0.0, le=1e6)]


class PrivateGaussian:
    """N(0, 1), or Laplace(1), from a generator whose key comes from the operating system, never
    from the recipe's seed.

    A peer could draw the noise of a known seed and subtract it. The key of numpy's Philox has 128
    bits; torch's CPU generator uses 32 bits of a seed, few enough to try them all.
    """

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def like(self, reference: Tensor) -> Tensor:
        """Draws float32 noise of the reference's shape, on its device."""
        return torch.from_numpy(self._random.standard_normal(reference.shape, dtype=np.float32)).to(
            reference.device
        )

    def laplace_like(self, reference: Tensor) -> Tensor:
        """Draws float32 noise of Laplace(1) of the reference's shape, on its device."""
        drawn = self._random.laplace(size=tuple(reference.shape)).astype(np.float32)
        return torch.from_numpy(drawn).to(reference.device)

    def state(self) -> dict[str, Any]:
        """Returns the generator's state, for this party's own checkpoints: anyone who knows it can
        subtract the noise.
        """
        state = dict(self._random.bit_generator.state)
        counters = {name: array.tolist() for name, array in state["state"].items()}
        return {**state, "state": counters, "buffer": state["buffer"].tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the noise of the generator that returned ``state``."""
        self._random.bit_generator.state = state


class NoisyFilter(Filter):
    """A filter that adds noise of ``random``."""

    draws = True

    def __init__(self) -> None:
        self._random = PrivateGaussian()

    @property
    def random(self) -> PrivateGaussian:
        """The generator, whose key comes from the operating system."""
        return self._random

    def renew(self) -> None:
        self._random = PrivateGaussian()

    def state(self) -> dict[str, Any]:
        """Returns the generator's state, for this party's own checkpoints."""
        return self._random.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the noise of the one that returned ``state``."""
        self._random.load_state(state)
