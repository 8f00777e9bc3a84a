"""Implements BYOL's loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def byol(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of 2 - 2 cos(p, z), a scalar in 0..4 (FedHSSL, Eq. 3). No gradient
    flows into z.

    p_BD: The prediction of a view. z_BD: The projection of the other view by the momentum encoder.
    The value is the squared distance of p and z on the unit sphere.
    """
    return 2 - 2 * functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()
