"""Attention over the parties' embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AttentionPooling(nn.Module):
    """Pools the embeddings of the present parties with attention weights: z = Σ a_k z_k.

    a_k = exp(wᵀ tanh(V z_k)) / Σ_j exp(wᵀ tanh(V z_j)), with learnt V [D, D] and w [D] (Ilse,
    Tomczak and Welling 2018, arXiv 1802.04712, Eq. 7 and 8, with L = D). Each row has its own
    weights, which do not depend on the order of the embeddings. The weights of the present parties
    always add up to 1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # These are linear layers, so that DP-SGD can compute per-example gradients.
        self.hidden = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, z_BKD: Tensor) -> Tensor:
        """Returns the attention weights a [B, K], which add up to 1 in each row."""
        scores_BK1: Tensor = self.score(torch.tanh(self.hidden(z_BKD)))
        return scores_BK1.squeeze(2).softmax(dim=1)

    def forward(self, z_BKD: Tensor) -> Tensor:
        """Pools the K embeddings of each row, [B, K, D] -> [B, D]."""
        return (self.weights(z_BKD).unsqueeze(2) * z_BKD).sum(dim=1)
