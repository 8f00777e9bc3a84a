"""Top-k sparsification: the k largest numbers of each row, or at random some of the others; their
places are packed.

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
    """Returns the bits of a place in a row of ``width`` numbers: 0 if the row has only one."""
    return (width - 1).bit_length()


def largest(x_RW: Floats, k: int) -> Places:
    """Returns the places of the k largest |x| of each row [R, W], ascending, [R, k]; of equal
    numbers the first ones.

    Raises ValueError if a number is NaN or infinite.
    """
    return _places(_top(x_RW, k), k)


def largest_at_random(x_RW: Floats, k: int, alpha: float, dither: Dither) -> Places:
    """Returns k places of each row [R, W], ascending, [R, k]: each from the k largest, or with
    probability ``alpha`` from the others.

    Within either group every place has the same probability, and none is drawn twice. So the count
    of others is binomial (k, ``alpha``), limited to all of them. Raises as ``largest`` does.
    """
    top_RW = _top(x_RW, k)
    rows, width = x_RW.shape
    # The upper 53 bits, which a float64 holds exactly.
    draws = dither.keys(rows, k) >> np.uint64(11)
    others_R = np.minimum((draws * 2.0**-53 < alpha).sum(axis=1), width - k)
    # One sort puts the largest first, and orders both groups by their random bits; the lowest bits
    # of a key are the place.
    low = np.uint64((1 << place_bits(width)) - 1)
    keys = (dither.keys(rows, width) >> np.uint64(1)) | (~top_RW).astype(np.uint64) << np.uint64(63)
    order_RW = np.sort(keys & ~low | np.arange(width, dtype=np.uint64), axis=1) & low
    at_W = np.arange(width)
    drawn_RW = (at_W < k - others_R[:, None]) | ((at_W >= k) & (at_W < k + others_R[:, None]))
    return np.sort(order_RW[drawn_RW].reshape(rows, k).astype(np.int64), axis=1)


def pack_places(places_RK: Places, width: int) -> Bytes:
    """Packs places [R, k] with as many bits as ``width`` needs, the lowest bit first, into bytes
    [R, ceil(k * bits / 8)].
    """
    rows, k = places_RK.shape
    bits = place_bits(width)
    ones = (places_RK[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(ones.astype(np.uint8).reshape(rows, k * bits), axis=1, bitorder="little")


def unpack_places(packed: Bytes, k: int, width: int) -> Places:
    """Undoes ``pack_places``. Raises ValueError if the places of a row are not ascending, or beyond
    its end.
    """
    rows, bits = len(packed), place_bits(width)
    ones = np.unpackbits(packed, axis=1, count=k * bits, bitorder="little").reshape(rows, k, bits)
    places: Places = (ones.astype(np.int64) << np.arange(bits)).sum(axis=2)
    if bool((places >= width).any()):
        raise ValueError("has an index beyond its row")
    if bool((np.diff(places, axis=1) <= 0).any()):
        raise ValueError("has indices that do not ascend")
    return places


def _top(x_RW: Floats, k: int) -> npt.NDArray[np.bool_]:
    """Marks the k largest of each row [R, W]; of the numbers that equal the k-th largest, the first
    ones.
    """
    if not np.isfinite(x_RW).all():
        raise ValueError("holds NaN or infinity")
    size_RW = np.abs(x_RW)
    kth_R = np.partition(size_RW, -k, axis=1)[:, -k][:, None]
    above_RW, equal_RW = size_RW > kth_R, size_RW == kth_R
    room_R = k - above_RW.sum(axis=1)[:, None]
    top_RW: npt.NDArray[np.bool_] = above_RW | (equal_RW & (np.cumsum(equal_RW, axis=1) <= room_R))
    return top_RW


def _places(chosen_RW: npt.NDArray[np.bool_], k: int) -> Places:
    return np.nonzero(chosen_RW)[1].reshape(len(chosen_RW), k)
