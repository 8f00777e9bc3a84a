"""float32 in two bytes without torch, rounded as torch does: to the nearest, ties to even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vfl_common.packing.bits import Floats

_WRONG = "holds a number that is too large for two bytes, NaN or infinity"


def to_float16(x: Floats) -> npt.NDArray[np.float16]:
    """Raises ValueError if a number is NaN, infinite, or larger than float16 writes."""
    with np.errstate(over="ignore"):
        found = x.astype(np.float16)
    if not np.isfinite(found).all():
        raise ValueError(_WRONG)
    return found


def to_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Returns the upper halves of the numbers' bits. Raises ValueError as ``to_float16``."""
    raw = x.view(np.uint32)
    found = ((raw + (np.uint32(0x7FFF) + ((raw >> 16) & 1))) >> 16).astype(np.uint16)
    if not (np.isfinite(x).all() and np.isfinite(from_bfloat16(found)).all()):
        raise ValueError(_WRONG)
    return found


def from_bfloat16(x: npt.NDArray[np.uint16]) -> Floats:
    """Returns the same numbers as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)
