"""Random numbers for a batch, from a CPU generator."""

from __future__ import annotations

import torch
from torch import Tensor


def between(low: float, high: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws float32 of ``shape``, evenly from low..high."""
    return torch.rand(shape, generator=generator).mul_(high - low).add_(low)


def happens(probability: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws bool of ``shape``: each true with ``probability``; never at 0, always at 1."""
    return torch.rand(shape, generator=generator) < probability
