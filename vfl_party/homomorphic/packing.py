"""Packs a pair of integers into one: g · 2^64 + h. Sums of packed pairs are packed pairs of sums.

g may be negative, h may not. Both sums stay below 2^62, which leaves two guard bits each, so that
neither overflows into the other. Several final sums s_t are packed into one plaintext, the sum of
s_t · 2^(128 t).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vfl_party.homomorphic.scheme import CipherError, Integers

# The bits of a packed pair, including its sign.
BITS = 128
LIMIT = 1 << 62
_RANGE = "it decrypts to a number out of range, like a ciphertext of another key"
_HALF, _DIGIT = 1 << (BITS - 1), (1 << BITS) - 1


def pack(g_N: Integers, h_N: Integers) -> list[int]:
    """Packs each pair into one integer."""
    return [(g << 64) + h for g, h in zip(g_N.tolist(), h_N.tolist(), strict=True)]


def ciphers_for(count: int, together: int) -> int:
    """Returns the number of ciphertexts for ``count`` sums. ``together``: The maximum number of
    sums in a ciphertext.
    """
    return -(-count // together)


def apart(packed: Iterable[int], count: int) -> list[int]:
    """Unpacks ``count`` sums from plaintexts with several sums each. Returns first the lowest sum
    of each plaintext in order, then the next sum of each, and so on.

    Raises CipherError if a plaintext contains more sums.
    """
    sums, remaining = list[int](), list(packed)
    for _ in range(ciphers_for(count, max(1, len(remaining)))):
        for index, value in enumerate(remaining):
            # The lowest digit is a signed number.
            lowest = ((value + _HALF) & _DIGIT) - _HALF
            sums.append(lowest)
            remaining[index] = (value - lowest) >> BITS
    if any(remaining):
        raise CipherError(_RANGE)
    return sums[:count]


def unpack(packed: Iterable[int]) -> tuple[Integers, Integers]:
    """Unpacks pairs. Returns all g and all h, int64 [N] each. Raises CipherError if a number is not
    a packed pair.
    """
    g, h = [], []
    for value in packed:
        high, low = divmod(value, 1 << 64)
        if low >= LIMIT or not -LIMIT < high < LIMIT:
            raise CipherError(_RANGE)
        g.append(high)
        h.append(low)
    return np.array(g, np.int64), np.array(h, np.int64)
