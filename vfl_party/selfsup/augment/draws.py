"""Random numbers for a batch, from a CPU generator."""

from __future__ import annotations

import torch
from torch import Tensor


def between(low: float, high: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws float32 numbers of ``shape``, uniform from ``low`` to ``high``."""
    return torch.rand(shape, generator=generator).mul_(high - low).add_(low)


def happens(probability: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws booleans of ``shape``, each true with ``probability``."""
    return torch.rand(shape, generator=generator) < probability
