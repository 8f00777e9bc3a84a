"""Packs a pair of integers into one: g · 2^64 + h. Sums of packed pairs are packed pairs of sums.

g may be negative, h may not; both sums stay below 2^62, so that neither reaches into the other: two guard bits each.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vfl_party.homomorphic.scheme import CipherError, Integers

BITS = 128  # of a packed pair, with its sign
LIMIT = 1 << 62


def pack(g_N: Integers, h_N: Integers) -> list[int]:
    """Returns each pair as one integer."""
    return [(g << 64) + h for g, h in zip(g_N.tolist(), h_N.tolist(), strict=True)]


def unpack(packed: Iterable[int]) -> tuple[Integers, Integers]:
    """Returns the pairs of packed sums. Raises CipherError if one is no such sum."""
    g, h = [], []
    for value in packed:
        high, low = divmod(value, 1 << 64)
        if low >= LIMIT or not -LIMIT < high < LIMIT:
            raise CipherError("it decrypts to a number out of range, as one of another key does")
        g.append(high)
        h.append(low)
    return np.array(g, np.int64), np.array(h, np.int64)
