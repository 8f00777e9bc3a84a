"""Draws random numbers for a batch from a CPU generator."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_uniform(low: float, high: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws a float32 tensor of ``shape``, uniform from ``low`` to ``high``."""
    return torch.rand(shape, generator=generator).mul_(high - low).add_(low)


def draw_booleans(probability: float, *shape: int, generator: torch.Generator) -> Tensor:
    """Draws a boolean tensor of ``shape``. Each element is true with ``probability``."""
    return torch.rand(shape, generator=generator) < probability
