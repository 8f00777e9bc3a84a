"""Joins a party's cross-party and local encoders for fine-tuning (FedHSSL, section IV)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """Combines the embeddings of two encoders of the same inputs: their mean or concatenation.

    Args:
        cross: The cross-party encoder. For ``concat`` its width is half the recipe's width.
        local: The local encoder, of the same width as ``cross``.
        rule: The rule that combines the two embeddings.
    """

    def __init__(self, cross: nn.Module, local: nn.Module, rule: Literal["mean", "concat"]) -> None:
        super().__init__()
        self.cross, self.local, self.rule = cross, local, rule

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the combined embeddings [B, D] of an encoder's ``inputs``."""
        cross_BD, local_BD = self.cross(*inputs), self.local(*inputs)
        if self.rule == "concat":
            return torch.cat([cross_BD, local_BD], dim=1)
        mean_BD: Tensor = (cross_BD + local_BD) / 2
        return mean_BD
