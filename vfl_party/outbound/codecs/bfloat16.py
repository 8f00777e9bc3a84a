"""Encodes float32 as bfloat16: half the bytes, the same range, 8 bits of precision."""

from __future__ import annotations

import torch

from vfl_common.bundle import DType
from vfl_party.outbound.codecs.float16 import TwoBytes


class BFloat16(TwoBytes):
    """Rounds to the nearest bfloat16, ties to even, as torch does. The range is the same as
    float32's, up to rounding.
    """

    text = "bfloat16"
    dtype, wire = torch.bfloat16, DType.BFLOAT16


CODEC = BFloat16
