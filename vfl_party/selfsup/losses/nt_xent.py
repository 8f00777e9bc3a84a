"""Implements SimCLR's loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def nt_xent(p_BD: Tensor, z_BD: Tensor, temperature: float) -> Tensor:
    """Computes the symmetric, normalised, temperature-scaled cross-entropy, a scalar (SimCLR, Eq.
    1; SS-VFL, Eq. 2).

    Row i of p_BD and row i of z_BD are a pair. The loss is the mean over all 2B rows of the
    cross-entropy of finding a row's partner among the 2B - 1 other rows, with logits cosine /
    ``temperature``. Gradient flows into both arguments, so the caller must detach another party's
    tensor. With B = 1 there are no negatives and the loss is zero.
    """
    # There are N = 2B rows.
    rows_ND = functional.normalize(torch.cat([p_BD, z_BD]), dim=1)
    logits_NN = (rows_ND / temperature) @ rows_ND.T
    # No row is its own negative.
    logits_NN.fill_diagonal_(float("-inf"))
    partner_N = torch.arange(len(rows_ND), device=rows_ND.device).roll(len(p_BD))
    return functional.cross_entropy(logits_NN, partner_N)
