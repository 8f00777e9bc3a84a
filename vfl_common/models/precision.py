"""In which numbers a model computes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16"]


def forward(model: nn.Module, inputs: tuple[Tensor, ...], precision: Precision) -> Tensor:
    """The model's output, always float32: that is what the loss takes and the wire carries.

    ``bfloat16``: matrix products and convolutions in it, forward and backward, where torch's autocast finds that safe;
    parameters, their gradients and the optimizer stay float32.
    """
    if precision == "float32":
        out: Tensor = model(*inputs)
        return out
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
        out = model(*inputs)
    return out.float()
