"""Two encoders as one: a party's cross-party and its local encoder, as fine-tuning uses them
(FedHSSL, section IV).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn


class TwoTowers(nn.Module):
    """z = (cross(x) + local(x)) / 2, or both side by side.

    Args:
        cross, local: encoders of the same inputs; for ``concat`` each gives half of the recipe's
            embedding.
    """

    def __init__(self, cross: nn.Module, local: nn.Module, rule: Literal["mean", "concat"]) -> None:
        super().__init__()
        self.cross, self.local, self.rule = cross, local, rule

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, D]."""
        cross_BD, local_BD = self.cross(*inputs), self.local(*inputs)
        if self.rule == "concat":
            return torch.cat([cross_BD, local_BD], dim=1)
        mean_BD: Tensor = (cross_BD + local_BD) / 2
        return mean_BD
