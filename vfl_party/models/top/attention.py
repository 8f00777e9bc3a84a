"""Attention over the parties' embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AttentionPooling(nn.Module):
    """Pools the embeddings of the parties that are there: z = Σ a_k z_k.

    a_k = exp(wᵀ tanh(V z_k)) / Σ_j exp(wᵀ tanh(V z_j)), with V [D, D] and w [D] learnt (Ilse,
    Tomczak and Welling 2018, arXiv 1802.04712, Eq. 7 and 8, with L = D). A row has weights of its
    own. They depend on the embeddings alone and not on their order, and a party that is left out
    has weight 0: the others' weights still add to 1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # Linear layers, so that DP-SGD can compute each row's own gradient.
        self.hidden = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, z_BKD: Tensor) -> Tensor:
        """Returns a [B, K], which add to 1 in each row."""
        scores_BK1: Tensor = self.score(torch.tanh(self.hidden(z_BKD)))
        return scores_BK1.squeeze(2).softmax(dim=1)

    def forward(self, z_BKD: Tensor) -> Tensor:
        """Pools K embeddings of each row, [B, K, D] -> [B, D]."""
        return (self.weights(z_BKD).unsqueeze(2) * z_BKD).sum(dim=1)
