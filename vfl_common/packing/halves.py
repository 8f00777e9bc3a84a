"""float32 in two bytes without torch, rounded as torch does: to the nearest, ties to even."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

WRONG = "holds a number that is too large for two bytes, NaN or infinity"


def to_float16(x: Floats) -> npt.NDArray[np.float16]:
    """Raises ValueError if a number is NaN, infinite, or larger than float16 writes."""
    with np.errstate(over="ignore"):
        found = x.astype(np.float16)
    if not np.isfinite(found).all():
        raise ValueError(WRONG)
    return found


def to_bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """Returns the upper halves of the numbers' bits. Raises ValueError as ``to_float16``."""
    raw = x.view(np.uint32)
    found = ((raw + (np.uint32(0x7FFF) + ((raw >> 16) & 1))) >> 16).astype(np.uint16)
    if not (np.isfinite(x).all() and np.isfinite(from_bfloat16(found)).all()):
        raise ValueError(WRONG)
    return found


def bfloat16_below(x: Floats) -> Floats:
    """Returns the largest numbers of bfloat16, as float32, that are not above ``x``; -inf if there
    is none.
    """
    raw = x.view(np.uint32)
    return (
        (raw + np.where(np.signbit(x), np.uint32(0xFFFF), np.uint32(0))) & np.uint32(0xFFFF0000)
    ).view(np.float32)


def bfloat16_above(x: Floats) -> Floats:
    """Returns the smallest numbers of bfloat16, as float32, that are not below ``x``; inf if there
    is none.
    """
    return -bfloat16_below(-x)


def written(x: Floats) -> npt.NDArray[np.uint16]:
    """Returns what ``to_bfloat16`` does, of numbers that bfloat16 writes as they are."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def from_bfloat16(x: npt.NDArray[np.uint16]) -> Floats:
    """Returns the same numbers as float32."""
    return (x.astype(np.uint32) << 16).view(np.float32)
