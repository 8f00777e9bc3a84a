"""Gradients of randomly perturbed labels, with differential privacy of each label (Yang et al.,
arXiv 2203.02073).
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.errors import Code, InputError
from vfl_party.base.mechanism import Mechanism
from vfl_party.outbound.filter import Tensors
from vfl_party.outbound.noise import NoisyFilter
from vfl_party.outbound.transforms import Transform


class LabelDpSettings(Section):
    """Settings of the transform."""

    epsilon: Annotated[float, Field(ge=1e-3, le=1e4)]
    """ε of one message, for one row's label; E epochs cost E·ε."""


class LabelDp(NoisyFilter):
    """g + Σ_c u_c·∇_c with u_c ~ Laplace(2/ε), where ∇_c is the row's gradient if its class were c.

    g = Σ_c y_c·∇_c is linear in the one-hot label y, of which another label changes two elements by
    1: so it is the Laplace mechanism, and one message is ε-differentially private in each label,
    given the top model. E epochs send each row E times: E·ε. The top model itself learns from the
    true labels; what its weights tell later is not counted.
    """

    knows = frozenset({"class gradients"})

    def __init__(self, settings: LabelDpSettings) -> None:
        self._scale = 2.0 / settings.epsilon
        # Another label moves two elements by 1 each, and each has noise of its own.
        self.costs = Mechanism("laplace", self._scale, times=2)
        self.text = f"label perturbation (ε = {settings.epsilon:g} a message)"
        super().__init__()
        self._of_class_CBD: Tensor | None = None

    def tell(self, beside: Tensors) -> None:
        self._of_class_CBD = beside["class gradients"].detach()

    def noise(self, g_BD: Tensor, of_class_CBD: Tensor) -> Tensor:
        """Returns g with noise: same shape, dtype and device, no graph."""
        u_CB = self._scale * self._random.laplace_like(of_class_CBD[:, :, 0])
        noisy: Tensor = g_BD.detach() + torch.einsum("cb,cbd->bd", u_CB, of_class_CBD.float()).to(
            g_BD.dtype
        )
        return noisy

    def apply(self, tensors: Tensors) -> Tensors:
        if self._of_class_CBD is None:
            text = "label_dp was not told the gradients of each class; correct the method"
            raise InputError(Code.CONFIG_INVALID, text)
        of_class_CBD = self._of_class_CBD
        return {name: self.noise(x, of_class_CBD) for name, x in tensors.items()}


TRANSFORM = Transform(LabelDpSettings, LabelDp, frozenset({"binary", "multiclass"}))
