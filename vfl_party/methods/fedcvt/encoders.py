"""A party's two networks as one encoder: the unique representation, then the shared one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.phases.context import MakeEncoder

# Also the labels from which initial weights are drawn.
UNIQUE, SHARED = "unique", "shared"


class TwoNetworks(nn.Module):
    """R = [U; C], U = unique(x), C = shared(x).

    Args:
        unique, shared: encoders of the same inputs; each gives half of the recipe's embedding.
    """

    def __init__(self, unique: nn.Module, shared: nn.Module) -> None:
        super().__init__()
        self.unique, self.shared = unique, shared

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        return torch.cat([self.unique(*inputs), self.shared(*inputs)], dim=1)


def two_networks(_settings: FedCVTSettings, make: MakeEncoder) -> nn.Module:
    """Makes the encoder that later phases get, with its initial weights: see ``Method.encoder``.
    Raises InputError.
    """
    width = make.width
    if width % 2:
        raise InputError(
            Code.CONFIG_INVALID,
            "recipe: phases: fedcvt gives each of a party's two networks half of the embedding, "
            f"so model.embedding_size must be even (got {width}). Set an even number.",
        )
    return TwoNetworks(make(UNIQUE, width=width // 2), make(SHARED, width=width // 2))
