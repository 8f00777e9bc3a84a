"""Marvell: adds noise to gradients by class, with the covariance that hides a binary label best at
its power (Li et al. 2022).
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.errors import Code, InputError
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter, Positive
from vfl_party.outbound.sumkl import Statistics, optimum, sum_kl
from vfl_party.outbound.transforms import Transform

_GROWTH, _MAX_SCALE = 1.5, 1e6


class MarvellSettings(Section):
    """Settings of the transform. With ``error``, s starts at 1 in each batch and is multiplied by
    1.5 until ½ − √sumKL/4 >= error.
    """

    scale: Positive | None = None
    """s, the mean squared length of the noise divided by the squared distance of the class means.
    Set this or ``error``.
    """
    error: Annotated[float, Field(gt=0.0, lt=0.5)] | None = None
    """The minimum error of any detector. The smallest sufficient s is found for each batch."""

    def model_post_init(self, _context: Any) -> None:
        if (self.scale is None) == (self.error is None):
            raise ValueError("set either scale or error, not both")


class Marvell(NoisyFilter):
    """Adds √(λ1 − λ2)·N(0, 1)·Δ/‖Δ‖ + √λ2·N(0, I) to each row, Δ = mean positive − mean negative
    gradient.

    ``vfl_party.outbound.sumkl.optimum`` computes λ1 and λ2 of each class from the batch's
    gradients, at power s·‖Δ‖². A batch of one class has no Δ. Its rows get N(0, s·‖mean
    gradient‖²/d) in each element. With ``error``, s is then taken from the previous batch (1 in the
    first). Two classes with the same mean get no noise, because the power is zero.
    """

    knows = frozenset({"labels"})

    def __init__(self, settings: MarvellSettings) -> None:
        self._scale, self._error = settings.scale, settings.error
        goal = (
            f"s = {settings.scale:g}"
            if settings.scale is not None
            else f"error ≥ {settings.error:g}"
        )
        self.text = f"Marvell noise ({goal})"
        super().__init__()
        self._last_scale = settings.scale or 1.0
        self._positive_B: Tensor | None = None

    def tell(self, beside: Tensors) -> None:
        self._positive_B = beside["labels"].detach().reshape(-1) == 1

    def noise(self, g_BD: Tensor, positive_B: Tensor) -> Tensor:
        """Returns g with noise, in the same shape, dtype and device, without a graph."""
        rows = g_BD.detach().flatten(1).double()
        along_B, across_BD = (
            self._random.like(rows[:, 0]).double(),
            self._random.like(rows).double(),
        )
        if bool(positive_B.all()) or not bool(positive_B.any()):
            sigma = math.sqrt(self._last_scale / rows.shape[1]) * rows.mean(dim=0).norm()
            return _cast_like(rows + sigma * across_BD, g_BD)
        negatives, positives = rows[~positive_B], rows[positive_B]
        mean_0, mean_1 = negatives.mean(dim=0), positives.mean(dim=0)
        delta_D = mean_1 - mean_0
        statistics = Statistics(
            u=(negatives - mean_0).pow(2).mean().item(),
            v=(positives - mean_1).pow(2).mean().item(),
            gap=delta_D.pow(2).sum().item(),
            share=len(positives) / len(rows),
            width=rows.shape[1],
        )
        if statistics.gap == 0.0:
            return g_BD.detach()
        variances = optimum(statistics, self._choose_power(statistics))
        lambda1_B = torch.where(positive_B, variances.along_1, variances.along_0).double()
        lambda2_B = torch.where(positive_B, variances.across_1, variances.across_0).double()
        unit_D = delta_D / delta_D.norm()
        along_BD = ((lambda1_B - lambda2_B).clamp_min(0.0).sqrt() * along_B)[:, None] * unit_D
        return _cast_like(rows + along_BD + lambda2_B.sqrt()[:, None] * across_BD, g_BD)

    def _choose_power(self, statistics: Statistics) -> float:
        """Returns s·‖Δ‖². With ``error``, s is the first of 1, 1.5, 2.25, … that reaches it."""
        if self._error is None:
            return self._last_scale * statistics.gap
        scale = 1.0
        while (
            scale < _MAX_SCALE
            and sum_kl(statistics, optimum(statistics, scale * statistics.gap))
            > (2 - 4 * self._error) ** 2
        ):
            scale *= _GROWTH
        self._last_scale = scale
        return scale * statistics.gap

    def apply(self, tensors: Tensors) -> Tensors:
        if self._positive_B is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "marvell: the method did not pass the labels of the rows. Correct the method.",
            )
        positive_B = self._positive_B
        return {name: self.noise(x, positive_B.to(x.device)) for name, x in tensors.items()}

    def state(self) -> dict[str, Any]:
        return {"random": super().state(), "last": self._last_scale}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state["random"])
        self._last_scale = state["last"]


def _cast_like(rows: Tensor, g_BD: Tensor) -> Tensor:
    return rows.to(g_BD.dtype).view_as(g_BD)


TRANSFORM = Transform(MarvellSettings, Marvell, frozenset({"binary"}), of_batch=True)
