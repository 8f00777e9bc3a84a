"""SimSiam's loss."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def simsiam(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of -cos(p, z), a scalar in -1..1; no gradient flows into z
    (FedHSSL, Eq. 4).

    p_BD: a view's prediction; z_BD: the other view's projection.
    """
    return -functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()
