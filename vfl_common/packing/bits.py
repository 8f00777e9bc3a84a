"""Quantization to 8, 4 or 2 bits: each row has a minimum and a step, and a value is stored as the
number of steps above the minimum. Also the conversion to 16-bit floats without
torch, which rounds as torch does: to the nearest value, ties to even.

A row's step is (maximum - minimum) / (2^bits - 1), rounded up in float32. With ``halves`` the
minimum is rounded down to bfloat16 and the step is rounded up, so that the steps still span the
row. Rows are computed in blocks that fit into a core's cache. Rows whose range is too large or too
small for float32 arithmetic are computed again in float64.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# The number of 16-bit numbers in one draw of 64 bits.
_NUMBERS_PER_WORD = 4


# The random numbers for stochastic rounding are derived from a seed, so that a repeated step gives
# the same bytes. They are public: anybody with the recipe can compute them. They keep the mean of
# rounded values, and give no privacy.
def derive_subseed(root: int, *names: object) -> int:
    """Derives a 63-bit seed from a seed and a path of names; different paths give unrelated
    seeds.
    """
    text = "\x1f".join([str(root), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Dither:
    """A stream of random numbers for stochastic rounding, derived from a seed, so that a repeated
    step gives the same bytes, on every machine and with every numpy version (raw words of SFC64).

    The random numbers are public: anybody with the recipe can compute them. They keep the mean of
    rounded values, and give no privacy.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)

    def sixteenths(self, rows: int, width: int) -> npt.NDArray[np.uint16]:
        """Returns random 16-bit numbers, [rows, width rounded up to a multiple of 4]."""
        words = self._bits.random_raw(rows * -(-width // _NUMBERS_PER_WORD))
        return words.astype("<u8", copy=False).view("<u2").reshape(rows, -1)

    def keys(self, rows: int, width: int) -> npt.NDArray[np.uint64]:
        """Returns random 64-bit numbers, [rows, width]."""
        return self._bits.random_raw(rows * width).reshape(rows, width)


Floats = npt.NDArray[np.float32]
NOT_REPRESENTABLE = "holds a number that is too large for two bytes, NaN or infinity"


# float16 and bfloat16 are rounded as torch does: to the nearest value, ties to even.
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


Bytes = npt.NDArray[np.uint8]

# The number of values in a block.
BLOCK = 1 << 15
# The maximum width of rows whose minimum and maximum are computed column by column.
_MAX_NARROW_WIDTH = 100
LARGEST = float(np.finfo(np.float32).max)
# Rows with a range between these limits can be computed in float32.
_MAX_RANGE, _MIN_RANGE = 2.0**125, 2.0**-100
# The factor by which rounding to bfloat16 may raise the maximum of a row.
_ROUNDED_UP = 1 + 2.0**-6
_UNIT_16 = np.float32(2.0**-16)


class PackedRows(NamedTuple):
    """Quantized rows: ``packed`` [R, ceil(W * bits / 8)] uint8, minimum ``low`` and step ``scale``
    [R] float32.
    """

    packed: Bytes
    low: Floats
    scale: Floats


def bytes_per_row(width: int, bits: int) -> int:
    """Returns the size of a packed row of ``width`` values, in bytes."""
    return -(-width * bits // 8)


def pack(x_RW: Floats, bits: int, dither: Dither | None, *, halves: bool = False) -> PackedRows:
    """Quantizes each number to ``bits`` bits.

    Args:
        x_RW: the rows [R, W], float32.
        bits: 8, 4 or 2.
        dither: The random numbers of stochastic rounding, which keeps the mean; None to round to
            the nearest step.
        halves: Whether minimum and step are rounded to bfloat16.

    Raises:
        ValueError: a number is NaN or infinite, or too large for bfloat16.
    """
    rows, width = x_RW.shape
    if not width:
        return PackedRows(
            np.empty((rows, 0), np.uint8), np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        )
    low_R, scale_R, inverse_R, odd_R = _compute_ranges(x_RW, bits, halves=halves)
    packed = np.empty((rows, bytes_per_row(width, bits)), np.uint8)
    padded, rows_per_block = -(-width // 4) * 4, max(1, BLOCK // width)
    t_BP, d_BP = (
        np.zeros((rows_per_block, padded), np.float32),
        np.empty((rows_per_block, padded), np.float32),
    )
    for start in range(0, rows, rows_per_block):
        block_rows = slice(start, min(start + rows_per_block, rows))
        count = block_rows.stop - start
        t, d = t_BP[:count], d_BP[:count]
        # Rows that overflow here are computed again in float64 below.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(x_RW[block_rows], low_R[block_rows, None], out=t[:, :width])
            t[:, :width] *= inverse_R[block_rows, None]
        overflowing = np.flatnonzero(odd_R[block_rows])
        if overflowing.size:
            x = x_RW[block_rows][overflowing].astype(np.float64)
            step = scale_R[block_rows][overflowing, None].astype(np.float64)
            t[overflowing, :width] = (x - low_R[block_rows][overflowing, None]) / np.where(
                step > 0, step, 1.0
            )
        if dither is None:
            t += np.float32(0.5)
        else:
            np.copyto(d, dither.sixteenths(count, width))
            d += np.float32(0.5)
            d *= _UNIT_16
            t += d
        if bits == 8:
            np.minimum(t, np.float32(255), out=t)
            q = t.astype(np.uint8)
        else:
            # A byte can also hold the value one above the largest, and bytes compare faster than
            # floats.
            q = t.astype(np.uint8)
            np.minimum(q, np.uint8((1 << bits) - 1), out=q)
        packed[block_rows] = _compress(q, bits)[:, : packed.shape[1]]
        t[:, width:] = 0.0
    return PackedRows(packed, low_R, scale_R)


def unpack(sent: PackedRows, width: int, bits: int) -> Floats:
    """Undoes ``pack``: returns the values [R, width], float32. Raises ValueError if ``pack`` cannot
    have returned ``sent``.
    """
    low_R, scale_R = sent.low, sent.scale
    if not (np.isfinite(low_R).all() and np.isfinite(scale_R).all()):
        raise ValueError("holds NaN or infinity")
    if bool((scale_R < 0).any()):
        raise ValueError("has a step below zero")
    top_R = low_R.astype(np.float64) + scale_R.astype(np.float64) * ((1 << bits) - 1)
    if bool((top_R > LARGEST * _ROUNDED_UP).any()):
        raise ValueError("exceeds the range of float32")
    rows = len(low_R)
    x_RW = np.empty((rows, width), np.float32)
    if not width:
        return x_RW
    odd_R = np.maximum(np.abs(low_R), top_R - low_R) > _MAX_RANGE
    rows_per_block = max(1, BLOCK // width)
    for start in range(0, rows, rows_per_block):
        block_rows = slice(start, min(start + rows_per_block, rows))
        q = _expand(sent.packed[block_rows], bits)[:, :width]
        x = x_RW[block_rows]
        np.copyto(x, q)
        with np.errstate(over="ignore", invalid="ignore"):
            x *= scale_R[block_rows, None]
            x += low_R[block_rows, None]
        overflowing = np.flatnonzero(odd_R[block_rows])
        if overflowing.size:
            exact = (
                q[overflowing] * scale_R[block_rows][overflowing, None].astype(np.float64)
                + low_R[block_rows][overflowing, None]
            )
            x[overflowing] = np.clip(exact, -LARGEST, LARGEST)
    return x_RW


def _compute_ranges(
    x_RW: Floats, bits: int, *, halves: bool
) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
    """Returns the minimum, the step and 1 / step of each row, and whether the row must be computed
    in float64, each [R].
    """
    low_R, high_R = _compute_extremes(x_RW)
    # Adding zero turns a negative zero into a positive one, so that all machines give the same
    # bytes.
    low_R += np.float32(0)
    if not (np.isfinite(low_R).all() and np.isfinite(high_R).all()):
        raise ValueError("holds NaN or infinity")
    if halves:
        low_R = round_down_to_bfloat16(low_R)
    range_R = high_R.astype(np.float64) - low_R
    step_R = range_R / ((1 << bits) - 1)
    scale_R = step_R.astype(np.float32)
    scale_R = np.where(scale_R < step_R, np.nextafter(scale_R, np.float32(np.inf)), scale_R)
    if halves:
        scale_R = round_up_to_bfloat16(scale_R)
        if not (np.isfinite(low_R).all() and np.isfinite(scale_R).all()):
            raise ValueError(NOT_REPRESENTABLE)
    usual_R = (range_R > _MIN_RANGE) & (np.maximum(range_R, np.abs(low_R)) < _MAX_RANGE)
    inverse_R = np.zeros(len(low_R), np.float32)
    inverse_R[usual_R] = 1.0 / scale_R[usual_R].astype(np.float64)
    return low_R, scale_R, inverse_R, ~usual_R & (range_R > 0)


def _compute_extremes(x_RW: Floats) -> tuple[Floats, Floats]:
    """Returns the minimum and maximum of each row, [R]. Narrow rows are processed column by column,
    many rows at a time.
    """
    rows, width = x_RW.shape
    if width > _MAX_NARROW_WIDTH:
        return x_RW.min(axis=1), x_RW.max(axis=1)
    low_R, high_R = np.empty(rows, np.float32), np.empty(rows, np.float32)
    rows_per_block = BLOCK // width
    for start in range(0, rows, rows_per_block):
        block_rows = slice(start, min(start + rows_per_block, rows))
        x_WB = np.ascontiguousarray(x_RW[block_rows].T)
        np.minimum.reduce(x_WB, axis=0, out=low_R[block_rows])
        np.maximum.reduce(x_WB, axis=0, out=high_R[block_rows])
    return low_R, high_R


def _compress(q_BP: Bytes, bits: int) -> Bytes:
    """Packs bytes [B, P] that use only ``bits`` bits; the first value goes to the lowest bits. P is
    a multiple of 4.
    """
    if bits == 8:
        return q_BP
    joined: npt.NDArray[Any] = q_BP.view("<u2" if bits == 4 else "<u4")
    if bits == 2:
        joined = joined | joined >> 6
    joined = joined | joined >> (4 if bits == 4 else 12)
    return joined.astype(np.uint8, copy=False)


def _expand(packed_BC: Bytes, bits: int) -> Bytes:
    """Undoes ``_compress``."""
    if bits == 8:
        return packed_BC
    if bits == 4:
        two = packed_BC.astype("<u2")
        two |= two << 4
        two &= 0x0F0F
        return two.view(np.uint8)
    four = packed_BC.astype("<u4")
    four |= four << 12
    four &= 0x000F000F
    four |= four << 6
    four &= 0x03030303
    return four.view(np.uint8)
