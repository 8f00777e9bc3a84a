"""Losses of self-supervision on embeddings, and the moving average and the queue for momentum
encoders.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_party.models import generator


def simsiam(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of -cos(p, z), a scalar in -1..1 (FedHSSL, Eq. 4). No gradient
    flows into z.

    p_BD: The prediction of a view. z_BD: The projection of the other view.
    """
    return -functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()


def byol(p_BD: Tensor, z_BD: Tensor) -> Tensor:
    """Returns the mean over rows of 2 - 2 cos(p, z), a scalar in 0..4 (FedHSSL, Eq. 3). No gradient
    flows into z.

    p_BD: The prediction of a view. z_BD: The projection of the other view by the momentum encoder.
    The value is the squared distance of p and z on the unit sphere.
    """
    return 2 - 2 * functional.cosine_similarity(p_BD, z_BD.detach(), dim=1).mean()


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


class KeyQueue:
    """A ring buffer of the last ``size`` keys, unit rows of ``width``. The keys are random at
    first, as in MoCo's own code.

    The first keys are drawn on the CPU from ``seed``, so that they are the same on every device.
    """

    def __init__(
        self, size: int, width: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        rows_QD = torch.randn(size, width, generator=generator(seed))
        self._keys_QD = functional.normalize(rows_QD, dim=1).to(device)
        # The index of the oldest key, which is overwritten next.
        self._next = 0

    @property
    def keys(self) -> Tensor:
        """The keys, [Q, D], without gradient. The tensor is never changed in place, because a
        backward pass may still follow a push.
        """
        return self._keys_QD

    @torch.no_grad()
    def push(self, k_BD: Tensor) -> None:
        """Overwrites the B oldest keys with the normalised rows of k_BD. If B > Q, only the last Q
        rows are used.
        """
        size = len(self._keys_QD)
        places_B = (
            torch.arange(self._next, self._next + len(k_BD), device=self._keys_QD.device) % size
        )
        rows_BD = functional.normalize(k_BD[-size:], dim=1).to(self._keys_QD)
        self._keys_QD = self._keys_QD.index_copy(0, places_B[-size:], rows_BD)
        self._next = (self._next + len(k_BD)) % size

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint. Later pushes do not change it."""
        return {"keys": self._keys_QD, "next": self._next}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the ``state`` of a queue of the same size, from any device."""
        self._keys_QD = state["keys"].to(self._keys_QD)
        self._next = state["next"]


@torch.no_grad()
def variance_kept(z_BD: Tensor) -> Tensor:
    """Returns the variance over rows of z / ‖z‖, summed over dimensions: a scalar on z's device,
    between 0 and 1.

    The value is 1 if directions are spread evenly over the sphere, and 0 if all rows point in the
    same direction. This is the collapse that SimSiam, section 4.1, detects by the standard
    deviation. There is no Bessel correction, so the value for a single row is 0.
    """
    unit_BD = functional.normalize(z_BD, dim=1)
    return unit_BD.var(dim=0, correction=0).sum()
