"""Rows that different parties hold, embedded by a network cut in two: its lower half at the party
that holds a row, its upper one, the tail, at the active party.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.base.seeds import Rows
from vfl_party.models.halves import Tail
from vfl_party.models.row_blocks import in_blocks
from vfl_party.phases.context import Party


def latent_of(party: Party) -> tuple[int, ...]:
    """Returns C, H and W of what a passive party sends."""
    tail = party.models.get("tail")
    if isinstance(tail, Tail):
        return tail.latent
    bottom = party.models["encoder"]
    with torch.no_grad():
        z = bottom(torch.zeros(1, *party.need_features().spec.shape, device=party.device))
    return tuple(z.shape[1:])


@torch.no_grad()
def latents_of(party: Party, rows: Rows) -> Tensor:
    """Returns the latents of a party's own rows, [B, C, H, W]."""
    bottom = party.models["encoder"]
    bottom.eval()
    return in_blocks(
        bottom, party.scores.blocks.get("encoder"), *party.need_features().inputs(rows)
    )


def features_of(party: Party, tail: Tail, z: Tensor) -> Tensor:
    """Returns the tail's features [B, E] of latents, computed in blocks; see
    ``vfl_party.models.row_blocks``.
    """
    return in_blocks(tail.features, party.scores.blocks.get("tail"), z)
