"""Implements MoCo's loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def moco(q_BD: Tensor, k_BD: Tensor, queue_QD: Tensor, temperature: float) -> Tensor:
    """Computes InfoNCE with a queue of negatives, the mean over rows, a scalar (FedHSSL, Eq. 2;
    MoCo, Eq. 1).

    q_BD: The queries. k_BD: The positive keys of the queries, into which no gradient flows. Both
    are normalised here. queue_QD: The negatives, unit rows without gradient (``KeyQueue.keys``).
    """
    q_BD = functional.normalize(q_BD, dim=1)
    k_BD = functional.normalize(k_BD.detach(), dim=1)
    positive_B1 = (q_BD * k_BD).sum(dim=1, keepdim=True)
    # The logits have the shape [B, 1 + Q]; column 0 is the positive key.
    logits = torch.cat([positive_B1, q_BD @ queue_QD.T], dim=1) / temperature
    return functional.cross_entropy(
        logits, torch.zeros(len(q_BD), dtype=torch.int64, device=q_BD.device)
    )
