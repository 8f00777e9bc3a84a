"""Computes the tail's loss on the latents of all parties (MocoSFL, section 3 and appendix A.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vfl_party.selfsup.losses import moco

Project = Callable[[Tensor], Tensor]


def contrast(
    online: Project,
    momentum: Project,
    q: Tensor,
    k: Tensor,
    memories: Sequence[Tensor],
    temperature: float,
    *,
    halved: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the symmetric loss, a scalar, and the new keys [2B, P], first for ``q`` and then for
    ``k``.

    The second term swaps the two latents, and no gradient flows into its ``q``.

    Args:
        online, momentum: The tail and its moving average.
        q, k: The latents [B, C, H, W] of two views of the same rows.
        memories: Earlier keys, each a tensor [Q, P] of rows with norm 1. One tensor is for all
            rows; several are for equal parts of the rows.
        halved: Whether the loss is the mean of both terms, as in the paper, and not their sum, as
            in the released code.
    """
    with torch.no_grad():
        keys_q, keys_k = momentum(q), momentum(k)
    total = _mean_loss(online(q), keys_k, memories, temperature) + _mean_loss(
        online(k), keys_q, memories, temperature
    )
    return total / 2 if halved else total, torch.cat([keys_q, keys_k])


def _mean_loss(q: Tensor, k: Tensor, memories: Sequence[Tensor], temperature: float) -> Tensor:
    """Returns the mean loss over all rows, where each part of the rows has its own memory of
    keys.
    """
    if len(memories) == 1:
        return moco(q, k, memories[0], temperature)
    parts = zip(q.chunk(len(memories)), k.chunk(len(memories)), memories, strict=True)
    return torch.stack([moco(*part, temperature) for part in parts]).mean()
