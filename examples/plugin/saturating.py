"""A codec: float16 that replaces a number that is too large by the largest one, instead of an
error.
"""

from __future__ import annotations

import torch

from vfl.api import Float16, Tensors

LARGEST = torch.finfo(torch.float16).max


class Saturating(Float16):
    text = "saturating float16"

    def apply(self, tensors: Tensors) -> Tensors:
        return super().apply(
            {name: x.detach().clamp(-LARGEST, LARGEST) for name, x in tensors.items()}
        )


CODEC = Saturating
