"""Packs a pair of integers into one: g · 2^64 + h. Sums of packed pairs are packed pairs of sums.

g may be negative, h may not; both sums stay below 2^62, so that neither reaches into the other: two
guard bits each. The final sums are packed once more, several into one plaintext: the sum of
s_t · 2^(128 t).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vfl_party.homomorphic.scheme import CipherError, Integers

# The bits of a packed pair, including its sign.
BITS = 128
LIMIT = 1 << 62
_RANGE = "it decrypts to a number out of range, as one of another key does"
_HALF, _DIGIT = 1 << (BITS - 1), (1 << BITS) - 1


def pack(g_N: Integers, h_N: Integers) -> list[int]:
    """Returns each pair as one integer."""
    return [(g << 64) + h for g, h in zip(g_N.tolist(), h_N.tolist(), strict=True)]


def ciphers_for(count: int, together: int) -> int:
    """Returns how many ciphertexts carry ``count`` sums, ``together`` at most in each."""
    return -(-count // together)


def apart(packed: Iterable[int], count: int) -> list[int]:
    """Unpacks ``count`` sums from plaintexts with several sums each: first the lowest of each
    plaintext, in order.

    Raises CipherError if a plaintext holds more.
    """
    sums, rest = list[int](), list(packed)
    for _ in range(ciphers_for(count, max(1, len(rest)))):
        for at, value in enumerate(rest):
            # The lowest digit is a signed number.
            lowest = ((value + _HALF) & _DIGIT) - _HALF
            sums.append(lowest)
            rest[at] = (value - lowest) >> BITS
    if any(rest):
        raise CipherError(_RANGE)
    return sums[:count]


def unpack(packed: Iterable[int]) -> tuple[Integers, Integers]:
    """Returns the sums g and h of packed pairs, int64 [N] each. Raises CipherError if a number is
    not a packed pair.
    """
    g, h = [], []
    for value in packed:
        high, low = divmod(value, 1 << 64)
        if low >= LIMIT or not -LIMIT < high < LIMIT:
            raise CipherError(_RANGE)
        g.append(high)
        h.append(low)
    return np.array(g, np.int64), np.array(h, np.int64)
