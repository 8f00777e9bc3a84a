"""Draws noise that no peer can reproduce."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vfl_party.outbound.filter import Filter

# The noise of a transform must be positive, because a recipe that lists the transform asks for
# noise.
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
# A noise amplifier among a method's settings may be 0, which means no noise.
Amplifier = Annotated[float, Field(ge=0.0, le=1e6)]


class PrivateGaussian:
    """Draws N(0, 1) or Laplace(1) from a generator whose key comes from the operating system, never
    from the recipe's seed.

    A peer that knows the seed could draw the same noise and subtract it. The key of numpy's Philox
    has 128 bits. Torch's CPU generator uses only 32 bits of a seed, few enough to try them all.
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
        """Returns the generator's state, only for this party's checkpoints. Anyone who knows the
        state can subtract the noise.
        """
        state = dict(self._random.bit_generator.state)
        counters = {name: array.tolist() for name, array in state["state"].items()}
        return {**state, "state": counters, "buffer": state["buffer"].tolist()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the random sequence of the generator that returned ``state``."""
        self._random.bit_generator.state = state


class NoisyFilter(Filter):
    """Base class of filters that add noise, which they draw from ``random``."""

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
        """Returns the generator's state, only for this party's checkpoints."""
        return self._random.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continues the random sequence of the filter that returned ``state``."""
        self._random.load_state(state)
