"""Whether representations have collapsed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


@torch.no_grad()
def spread(z_BD: Tensor) -> Tensor:
    """The standard deviation over rows of z / ‖z‖, averaged over dimensions, times √D: a scalar on z's device.

    1 where directions are spread evenly over the sphere, 0 where all rows point the same way: the collapse that
    SimSiam, section 4.1, watches for. It is of the rows given (no Bessel correction), and 0 for a single one.
    """
    unit_BD = functional.normalize(z_BD, dim=1)
    return unit_BD.std(dim=0, correction=0).mean() * math.sqrt(z_BD.shape[1])
