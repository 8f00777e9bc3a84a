"""Implements the update of the momentum encoder."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def ema_update(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """Sets target = momentum * target + (1 - momentum) * online, in place (MoCo, Eq. 2; BYOL, Eq.
    1).

    Only parameters are updated, in the order of ``parameters()``. The target keeps its own buffers,
    such as BatchNorm's statistics. Raises RuntimeError if the two modules have different numbers of
    parameters.
    """
    averaged: list[torch.Tensor] = list(target.parameters())
    new: list[torch.Tensor] = list(online.parameters())
    # A projector without layers has no parameters, and torch refuses empty lists.
    if averaged or new:
        torch._foreach_lerp_(averaged, new, 1 - momentum)
