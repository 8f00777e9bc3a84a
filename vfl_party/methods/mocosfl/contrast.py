"""The tail's loss on the latents of all parties: MocoSFL, section 3 and appendix A.1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vfl_party.selfsup.losses import moco

Project = Callable[[Tensor], Tensor]


def contrast(
    online: Project,
    momentum: Project,
    q: Tensor,
    k: Tensor,
    queue_QD: Tensor,
    temperature: float,
    *,
    halved: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the symmetric loss, a scalar, and the 2B new keys [2B, P], those of ``q`` first.

    The two latents change places in the second term, in which no gradient flows into ``q``.

    Args:
        online, momentum: the tail and its moving average.
        q, k: latents [B, C, H, W] of two views of the same rows.
        queue_QD: earlier keys, unit rows.
        halved: the mean of both terms, as in the paper; else their sum, as in the released code.
    """
    with torch.no_grad():
        keys_q, keys_k = momentum(q), momentum(k)
    total = moco(online(q), keys_k, queue_QD, temperature) + moco(
        online(k), keys_q, queue_QD, temperature
    )
    return total / 2 if halved else total, torch.cat([keys_q, keys_k])
