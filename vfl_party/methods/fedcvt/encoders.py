"""Combines a party's two networks into one encoder: the unique representation, then the shared
one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.phases.context import MakeEncoder

# The names of the two networks, from which the seeds of their initial weights are also derived.
UNIQUE, SHARED = "unique", "shared"


class TwoNetworks(nn.Module):
    """Computes R = [U; C] with U = unique(x) and C = shared(x).

    Args:
        unique, shared: Encoders of the same inputs, each of which computes half of the recipe's
            embedding.
    """

    def __init__(self, unique: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.unique, self.shared = unique, shared

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        return torch.cat([self.unique(*inputs), self.shared(*inputs)], dim=1)


def make_two_networks(_settings: FedCVTSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that later phases get, with its initial weights. See ``Method.encoder``.
    Raises InputError if the embedding size is odd.
    """
    width = make.width
    if width % 2:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: fedcvt gives each of a party's two networks half of the embedding, "
            f"so model.embedding_size must be even (got {width}). Set an even number.",
        )
    return TwoNetworks(make(UNIQUE, width=width // 2), make(SHARED, width=width // 2))
