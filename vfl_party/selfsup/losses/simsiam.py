"""Implements SimSiam's loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def simsiam(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of -cos(p, z), a scalar in -1..1 (FedHSSL, Eq. 4). No gradient
    flows into z.

    p_BD: The prediction of a view. z_BD: The projection of the other view.
    """
    return -functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()
