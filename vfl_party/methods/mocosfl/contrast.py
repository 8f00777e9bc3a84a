"""The tail's loss on the latents of all parties: MocoSFL, section 3 and appendix A.1."""

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
    """Returns the symmetric loss, a scalar, and the 2B new keys [2B, P], those of ``q`` first.

    The second term swaps the two latents, and no gradient flows into its ``q``.

    Args:
        online, momentum: the tail and its moving average.
        q, k: latents [B, C, H, W] of two views of the same rows.
        memories: earlier keys [Q, P], unit rows: one for all rows, or one for each of equal parts
            of the rows.
        halved: the mean of both terms, as in the paper; else their sum, as in the released code.
    """
    with torch.no_grad():
        keys_q, keys_k = momentum(q), momentum(k)
    total = _mean(online(q), keys_k, memories, temperature) + _mean(
        online(k), keys_q, memories, temperature
    )
    return total / 2 if halved else total, torch.cat([keys_q, keys_k])


def _mean(q: Tensor, k: Tensor, memories: Sequence[Tensor], temperature: float) -> Tensor:
    """Returns the mean loss over all rows, each part with the keys in its memory."""
    if len(memories) == 1:
        return moco(q, k, memories[0], temperature)
    parts = zip(q.chunk(len(memories)), k.chunk(len(memories)), memories, strict=True)
    return torch.stack([moco(*part, temperature) for part in parts]).mean()
