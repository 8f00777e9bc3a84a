"""Runs a model in the recipe's precision."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vfl_party.base.dtypes import real

Precision = Literal["float32", "bfloat16"]


def forward(model: nn.Module, *inputs: Tensor, precision: Precision) -> Tensor:
    """Returns the model's output, always in float32: the loss and the wire need that.

    ``bfloat16``: torch's autocast chooses the matrix products and convolutions that it is safe for,
    forward and backward; parameters, their gradients and the optimizer stay float32. On a CPU it
    turns oneDNN off for the whole process: in torch 2.15 it reads uninitialised memory in bfloat16
    convolutions (decision 0010).
    """
    if precision == "float32":
        out: Tensor = model(*inputs)
        return out
    if inputs[0].device.type == "cpu":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call] # not restored: the backward pass runs after this call
    # Inside another autocast torch would still have the weights that it has cast before the last
    # update.
    torch.clear_autocast_cache()
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
        out = model(*inputs)
    return out.to(real())
