"""Maps the dtypes of messages to torch's dtypes, and defines the dtype of real numbers."""

from __future__ import annotations

import torch

from vfl_common.bundle import DType

TORCH: dict[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}
WIRE: dict[torch.dtype, DType] = {dtype: wire for wire, dtype in TORCH.items()}


def get_real_dtype() -> torch.dtype:
    """Returns the dtype of parameters, inputs, losses and real numbers in messages: float32.

    Only exactness tests replace it with float64 (``tests/harness/float64.py``), so that a deviation
    of 1e-12 is an error of the program and not a rounding error.
    """
    return TORCH[DType.FLOAT32]
