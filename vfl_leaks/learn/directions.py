"""Directions of gradients: unit vectors, their main direction, and the direction of known rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def normalize_rows(g: Tensor) -> Tensor:
    """Returns the flattened rows of gradients [B, ...], scaled to length one, float64 [B, D]. A row
    of zeros stays zero.
    """
    return functional.normalize(g.double().flatten(1), dim=1)


def common_direction(g_BD: Tensor) -> Tensor:
    """Returns the main direction of rows [B, D]: their first singular vector, [D], up to its
    sign.
    """
    direction: Tensor = torch.linalg.svd(g_BD, full_matrices=False).Vh[0]
    return direction


def mean_direction(unit_KD: Tensor) -> Tensor:
    """Returns the direction of the mean of rows [K, D], [D]."""
    return functional.normalize(unit_KD.sum(dim=0), dim=0)
