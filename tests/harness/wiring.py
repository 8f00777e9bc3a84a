"""What the tables of ``wire`` make of a tensor that crosses, without chain and transport: for the
references.

It shares the packing functions with the programs; which table holds, and what a seed is derived
from, it says itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl_common.bundle import DType
from vfl_common.config.recipe import Recipe
from vfl_common.packing.coders import Bits, Coder, Half, TopK
from vfl_party.base.seeds import derive_seed


def coder_of(recipe: Recipe, phase: str, exchange: str, direction: str) -> Coder | None:
    """Returns the coder of the one table that fits."""
    fits = [
        each
        for each in recipe.wire
        if each.phase in (None, phase)
        and each.exchange in (None, exchange)
        and each.direction in (None, direction)
    ]
    assert len(fits) < 2, "the reference knows no precedence"
    if not fits or fits[0].codec == "identity":
        return None
    settings, codec = fits[0].settings, fits[0].codec
    if codec in ("float16", "bfloat16"):
        return Half(DType.FLOAT16 if codec == "float16" else DType.BFLOAT16)
    if codec == "bits":
        rounding, scales = settings.get("rounding", "stochastic"), settings.get("scales", "float32")
        return Bits(settings["bits"], rounding == "stochastic", scales == "bfloat16")
    alpha = settings.get("alpha", 0.1) if codec == "randtopk" else 0.0
    return TopK(settings["keep"], alpha, settings.get("values") == "float16")


def crossed(
    recipe: Recipe,
    phase: str,
    exchange: str,
    direction: str,
    sender: str,
    at: tuple[int, int],
    name: str,
    x: Tensor,
) -> Tensor:
    """Returns what the receiver reads of a tensor that is sent at round and batch ``at``."""
    coder = coder_of(recipe, phase, exchange, direction)
    if coder is None or coder.parts(tuple(x.shape)) is None:
        return x
    root = derive_seed(recipe.seed, "wire", phase, exchange, direction)
    sent = coder.encode(
        np.ascontiguousarray(x.detach().numpy()), derive_seed(root, sender, *at, name)
    )
    return torch.from_numpy(coder.decode(sent, tuple(x.shape)))


class There(torch.autograd.Function):
    """Sends an embedding on, and its gradient back; ``up`` and ``down`` say what becomes of
    them.
    """

    @staticmethod
    def forward(
        ctx: Any, z_BD: Tensor, up: Callable[[Tensor], Tensor], down: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.down = down
        return up(z_BD)

    @staticmethod
    def backward(ctx: Any, dz_BD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.down(dz_BD), None, None
