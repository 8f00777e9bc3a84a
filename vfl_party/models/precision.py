"""Runs a model in the recipe's precision."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from vfl_party.base.dtypes import get_real_dtype

Precision = Literal["float32", "bfloat16"]


def forward(model: nn.Module, *inputs: Tensor, precision: Precision) -> Tensor:
    """Runs the model and returns its output in float32, which the loss and the messages need.

    With ``bfloat16``, torch's autocast computes the matrix products and convolutions in bfloat16
    where this is safe, in the forward and the backward pass. Parameters, gradients and the
    optimizer's state stay in float32. On a CPU this function turns oneDNN off for the whole
    process, because oneDNN in torch 2.15 reads uninitialised memory in bfloat16 convolutions
    (decision 0010).
    """
    if precision == "float32":
        out: Tensor = model(*inputs)
        return out
    if inputs[0].device.type == "cpu":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call] # Not restored, because the backward pass runs after this call.
    # Inside an outer autocast, torch's cache still has the weights from before the last update.
    torch.clear_autocast_cache()
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
        out = model(*inputs)
    return out.to(get_real_dtype())
