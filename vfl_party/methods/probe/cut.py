"""Computes features with a network that is split in two: the party that holds a row has the bottom
model, and the active party has the upper half, called the tail.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.base.seeds import Rows
from vfl_party.models.halves import Tail
from vfl_party.models.row_blocks import in_blocks
from vfl_party.phases.context import Party


def get_latent_shape(party: Party) -> tuple[int, ...]:
    """Returns the shape (C, H, W) of the latent, that is, of the bottom model's output for a
    row.
    """
    tail = party.models.get("tail")
    if isinstance(tail, Tail):
        return tail.latent
    bottom = party.models["encoder"]
    with torch.no_grad():
        z = bottom(torch.zeros(1, *party.need_features().spec.shape, device=party.device))
    return tuple(z.shape[1:])


@torch.no_grad()
def compute_latents(party: Party, rows: Rows) -> Tensor:
    """Returns the latents of some of this party's rows, [B, C, H, W]."""
    bottom = party.models["encoder"]
    bottom.eval()
    return in_blocks(
        bottom, party.scores.blocks.get("encoder"), *party.need_features().inputs(rows)
    )


def compute_features(party: Party, tail: Tail, z: Tensor) -> Tensor:
    """Computes the tail's features [B, E] of latents, in blocks; see
    ``vfl_party.models.row_blocks``.
    """
    return in_blocks(tail.features, party.scores.blocks.get("tail"), z)
