"""In which numbers a model computes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16"]


def forward(model: nn.Module, inputs: tuple[Tensor, ...], precision: Precision) -> Tensor:
    """The model's output, always float32: that is what the loss takes and the wire carries.

    ``bfloat16``: matrix products and convolutions in it, forward and backward, where torch's autocast finds that safe;
    parameters, their gradients and the optimizer stay float32. On a CPU without oneDNN, in this whole process: that
    of torch 2.15 reads memory that nobody wrote in bfloat16 convolutions of stride 2 on small images (decision 0010).
    """
    if precision == "float32":
        out: Tensor = model(*inputs)
        return out
    if inputs[0].device.type == "cpu":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call] # for the backward pass too, which is not within this call
    with torch.autocast(inputs[0].device.type, dtype=torch.bfloat16):
        out = model(*inputs)
    return out.float()
