"""Measures whether representations have collapsed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def variance_kept(z_BD: Tensor) -> Tensor:
    """Returns the variance over rows of z / ‖z‖, summed over dimensions: a scalar on z's device,
    between 0 and 1.

    The value is 1 if directions are spread evenly over the sphere, and 0 if all rows point in the
    same direction. This is the collapse that SimSiam, section 4.1, detects by the standard
    deviation. There is no Bessel correction, so the value for a single row is 0.
    """
    unit_BD = functional.normalize(z_BD, dim=1)
    return unit_BD.var(dim=0, correction=0).sum()
