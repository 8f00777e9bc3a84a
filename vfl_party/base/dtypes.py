"""Maps the wire's dtypes to torch's, and names the dtype of all real numbers of a process."""

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


def real() -> torch.dtype:
    """Returns the dtype of parameters, inputs, losses and of real numbers on the wire: float32.

    Exactness tests replace it by float64 (``tests/harness/float64.py``): a deviation of 1e-12 is
    then an error of the program, not rounding. Nothing else changes it.
    """
    return TORCH[DType.FLOAT32]
