"""Directions of gradients: rows scaled to length one, what most of them share, and where known rows
point.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def unit(g: Tensor) -> Tensor:
    """Returns rows scaled to length one, float64 [B, D]; a row of zeros stays one."""
    return functional.normalize(g.double().flatten(1), dim=1)


def common_direction(g_BD: Tensor) -> Tensor:
    """Returns the direction [D] that most of the rows share: their first singular vector, up to its
    sign.
    """
    direction: Tensor = torch.linalg.svd(g_BD, full_matrices=False).Vh[0]
    return direction


def towards(unit_KD: Tensor) -> Tensor:
    """Returns the direction [D] of the mean of rows."""
    return functional.normalize(unit_KD.sum(dim=0), dim=0)
