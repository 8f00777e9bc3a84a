"""Adds noise along each row's gradient, so that all rows are on average as long as the longest (Li
et al. 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common.config.base import Section
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter
from vfl_party.outbound.transforms import Transform


class MaxNormSettings(Section):
    """Settings of the transform, which has none."""


class MaxNorm(NoisyFilter):
    """Sends g·(1 + ξ·√(‖g_max‖²/‖g‖² − 1)), ξ ~ N(0, 1) for each row, so that E‖·‖² is ‖g_max‖² for
    all rows of the batch.

    Only the length is hidden: a row keeps its direction up to its sign. A row of zeros gets a
    random direction.
    """

    text = "max norm"

    def noise(self, g_BD: Tensor) -> Tensor:
        """Returns g with noise, in the same shape, dtype and device, without a graph."""
        rows = g_BD.detach().flatten(1).double()
        xi_B, direction_BD = (
            self._random.like(rows[:, 0]).double(),
            self._random.like(rows).double(),
        )
        norm_B = torch.linalg.vector_norm(rows, dim=1)
        longest = norm_B.max() if len(rows) else norm_B.sum()
        zero_B = norm_B == 0
        safe_B = torch.where(zero_B, 1.0, norm_B)
        factor_B = 1 + xi_B * ((longest / safe_B) ** 2 - 1).clamp_min(0.0).sqrt()
        unit_BD = direction_BD / torch.linalg.vector_norm(
            direction_BD, dim=1, keepdim=True
        ).clamp_min(1e-30)
        noisy = torch.where(
            zero_B[:, None], xi_B[:, None] * longest * unit_BD, factor_B[:, None] * rows
        )
        return noisy.to(g_BD.dtype).view_as(g_BD)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


TRANSFORM = Transform(MaxNormSettings, lambda _settings: MaxNorm(), of_batch=True)
