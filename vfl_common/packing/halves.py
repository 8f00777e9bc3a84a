"""Converts float32 to float16 and bfloat16 without torch. It rounds as torch does: to the nearest
value, ties to even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

NOT_REPRESENTABLE = "holds a number that is too large for two bytes, NaN or infinity"


def to_float16(x: Floats) -> npt.NDArray[np.float16]:
    """Rounds to float16. Raises ValueError if a value is NaN, infinite, or too large for
    float16.
    """
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ValueError(NOT_REPRESENTABLE)
    return rounded


def to_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Rounds to bfloat16. Returns each value as the upper 16 bits of a float32. Raises ValueError
    as ``to_float16`` does.
    """
    raw = x.view(np.uint32)
    rounded = ((raw + (np.uint32(0x7FFF) + ((raw >> 16) & 1))) >> 16).astype(np.uint16)
    if not (np.isfinite(x).all() and np.isfinite(from_bfloat16(rounded)).all()):
        raise ValueError(NOT_REPRESENTABLE)
    return rounded


def round_down_to_bfloat16(x: Floats) -> Floats:
    """Rounds down to the nearest bfloat16 value, as float32; -inf below the smallest value."""
    raw = x.view(np.uint32)
    return (
        (raw + np.where(np.signbit(x), np.uint32(0xFFFF), np.uint32(0))) & np.uint32(0xFFFF0000)
    ).view(np.float32)


def round_up_to_bfloat16(x: Floats) -> Floats:
    """Rounds up to the nearest bfloat16 value, as float32; inf above the largest value."""
    return -round_down_to_bfloat16(-x)


def truncate_to_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Returns the upper 16 bits of float32 values that bfloat16 represents exactly."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(x: npt.NDArray[np.uint16]) -> Floats:
    """Converts bfloat16 values, given as 16-bit integers, to float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)
