"""BYOL's loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def byol(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of 2 - 2 cos(p, z), a scalar in 0..4; no gradient flows into z
    (FedHSSL, Eq. 3).

    p_BD: a view's prediction; z_BD: the other view's projection by the momentum encoder. The value
    is their squared distance on the unit sphere.
    """
    return 2 - 2 * functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()
