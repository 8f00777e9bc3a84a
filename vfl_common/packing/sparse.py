"""Top-k sparsification: selects the k largest values of each row, or some other values at random,
and packs their positions.

Random top-k: Zheng et al., "Reducing communication for split learning by randomized top-k
sparsification", IJCAI 2023 (arXiv 2305.18469).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vfl_common.packing.bits import Bytes
from vfl_common.packing.dither import Dither
from vfl_common.packing.halves import Floats

Places = npt.NDArray[np.int64]


def place_bits(width: int) -> int:
    """Returns the number of bits of a position in a row of ``width`` values; 0 if the row has one
    value.
    """
    return (width - 1).bit_length()


def find_largest(x_RW: Floats, k: int) -> Places:
    """Returns the positions [R, k] of the k largest |x| of each row [R, W], ascending. Among equal
    values the first positions are chosen.

    Raises ValueError if a number is NaN or infinite.
    """
    return _mask_to_places(_mask_largest(x_RW, k), k)


def draw_places(x_RW: Floats, k: int, alpha: float, dither: Dither) -> Places:
    """Returns k positions of each row [R, W], ascending, [R, k]. Each is drawn from the k largest
    values, or with probability ``alpha`` from the other values.

    Within each group every position has the same probability, and no position is drawn twice. The
    number of positions from the other values is binomial (k, ``alpha``), limited to W - k. Raises
    ValueError as ``find_largest`` does.
    """
    top_RW = _mask_largest(x_RW, k)
    rows, width = x_RW.shape
    # Only the upper 53 bits are used, because a float64 holds them exactly.
    draws = dither.keys(rows, k) >> np.uint64(11)
    num_others_R = np.minimum((draws * 2.0**-53 < alpha).sum(axis=1), width - k)
    # One sort puts the k largest first and orders each group at random. The lowest bits of a sort
    # key are the position, the bits above are random, and the highest bit is the group.
    place_mask = np.uint64((1 << place_bits(width)) - 1)
    keys = (dither.keys(rows, width) >> np.uint64(1)) | (~top_RW).astype(np.uint64) << np.uint64(63)
    order_RW = np.sort(keys & ~place_mask | np.arange(width, dtype=np.uint64), axis=1) & place_mask
    positions_W = np.arange(width)
    drawn_RW = (positions_W < k - num_others_R[:, None]) | (
        (positions_W >= k) & (positions_W < k + num_others_R[:, None])
    )
    return np.sort(order_RW[drawn_RW].reshape(rows, k).astype(np.int64), axis=1)


def pack_places(places_RK: Places, width: int) -> Bytes:
    """Packs positions [R, k] into bytes [R, ceil(k * bits / 8)], with ``place_bits(width)`` bits
    each, the lowest bit first.
    """
    rows, k = places_RK.shape
    bits = place_bits(width)
    bits_RKB = (places_RK[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(bits_RKB.astype(np.uint8).reshape(rows, k * bits), axis=1, bitorder="little")


def unpack_places(packed: Bytes, k: int, width: int) -> Places:
    """Undoes ``pack_places``. Raises ValueError if the positions of a row are not ascending, or are
    outside the row.
    """
    rows, bits = len(packed), place_bits(width)
    bits_RKB = np.unpackbits(packed, axis=1, count=k * bits, bitorder="little").reshape(
        rows, k, bits
    )
    places: Places = (bits_RKB.astype(np.int64) << np.arange(bits)).sum(axis=2)
    if bool((places >= width).any()):
        raise ValueError("has an index beyond its row")
    if bool((np.diff(places, axis=1) <= 0).any()):
        raise ValueError("has indices that do not ascend")
    return places


def _mask_largest(x_RW: Floats, k: int) -> npt.NDArray[np.bool_]:
    """Returns a mask [R, W] of the k largest |x| of each row. Among values equal to the k-th
    largest, the first ones are chosen.
    """
    if not np.isfinite(x_RW).all():
        raise ValueError("holds NaN or infinity")
    size_RW = np.abs(x_RW)
    kth_R = np.partition(size_RW, -k, axis=1)[:, -k][:, None]
    above_RW, equal_RW = size_RW > kth_R, size_RW == kth_R
    room_R = k - above_RW.sum(axis=1)[:, None]
    top_RW: npt.NDArray[np.bool_] = above_RW | (equal_RW & (np.cumsum(equal_RW, axis=1) <= room_R))
    return top_RW


def _mask_to_places(chosen_RW: npt.NDArray[np.bool_], k: int) -> Places:
    return np.nonzero(chosen_RW)[1].reshape(len(chosen_RW), k)
