"""MoCo's loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def moco(q_BD: Tensor, k_BD: Tensor, queue_QD: Tensor, temperature: float) -> Tensor:
    """Computes InfoNCE with a queue of negatives, the mean over rows, a scalar (FedHSSL, Eq. 2;
    MoCo, Eq. 1).

    q_BD: queries; k_BD: their positive keys, into which no gradient flows; both are normalised
    here. queue_QD: the negatives, unit rows without gradient (``KeyQueue.keys``).
    """
    q_BD = functional.normalize(q_BD, dim=1)
    k_BD = functional.normalize(k_BD.detach(), dim=1)
    positive_B1 = (q_BD * k_BD).sum(dim=1, keepdim=True)
    # [B, 1 + Q].
    logits = torch.cat([positive_B1, q_BD @ queue_QD.T], dim=1) / temperature
    return functional.cross_entropy(
        logits, torch.zeros(len(q_BD), dtype=torch.int64, device=q_BD.device)
    )
