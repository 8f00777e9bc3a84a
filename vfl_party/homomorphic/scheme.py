"""Defines the interface of a scheme: the keys on one side, and the adder on the other side. Packs
pairs of numbers, and has the scheme without encryption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
# Ciphertexts in the format of the wire, [N, bytes].
Wire = npt.NDArray[np.uint8]
# Ciphertexts in the format with which a scheme computes.
Held = Any


class CipherError(Exception):
    """Raised if a received message cannot be used. The text is the end of a sentence that says
    why.
    """


class Keys(Protocol):
    """The side with the private key. A plaintext is a pair (g, h) of integers. The sums of g and of
    h stay below 2^62.
    """

    # The public key, for ``make_adder``.
    public: bytes

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """Encrypts pairs with fresh randomness. Returns uint8 [N, bytes]. ``g_N``, ``h_N``: The
        numbers of the pairs, int64 [N] each.
        """
        ...

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        """Returns the ``count`` pairs of sums, int64 [count] each, that ``Adder.wire`` has packed.

        Raises CipherError if a sum is out of range.
        """
        ...


class Adder(Protocol):
    """The side with the public key. It adds ciphertexts without being able to decrypt them."""

    # The number of rows times columns from which several processes are faster; None if the scheme's
    # library has its own threads.
    pays_from: int | None

    def check(self, wire_N: Wire) -> None:
        """Raises CipherError if a ciphertext is out of range."""
        ...

    def load(self, wire_N: Wire) -> Held:
        """Converts ciphertexts into the format for computing. Raises CipherError if a ciphertext is
        out of range.
        """
        ...

    def sums(self, held: Held, places_P: Integers, ends_G: Integers) -> Held:
        """Returns the sum of the ciphertexts of each group of ``places_P``. Group g ends at
        ``ends_G[g]``, and no group is empty.
        """
        ...

    def zero(self) -> Held:
        """Returns one encryption of zero. It may be without randomness, because ``wire`` masks
        it.
        """
        ...

    def take(self, held: Held, places: Sequence[int]) -> Held:
        """Returns the ciphertexts at ``places``."""
        ...

    def add(self, a_M: Held, b_M: Held) -> Held:
        """Returns the sums of ``a_M`` and ``b_M``, pair by pair."""
        ...

    def concatenate(self, parts: Sequence[Held]) -> Held:
        """Concatenates the ciphertexts of all parts. There must be at least one part."""
        ...

    def raw(self, held: Held) -> Wire:
        """Encodes ciphertexts without masking, uint8 [N, bytes], for ``load`` in another process of
        this party.
        """
        ...

    def wire(self, held: Held) -> Wire:
        """Packs as many sums as fit into each ciphertext, masks it with a fresh encryption of zero,
        and encodes it for the wire, uint8 [W, bytes].

        With W ciphertexts, the first one contains the sums 0, W, 2 W, …: see ``apart``.
        """
        ...


# A pair of integers is packed into one: g · 2^64 + h. Sums of packed pairs are packed pairs of
# sums. g may be negative, h may not. Both sums stay below 2^62, which leaves two guard bits each,
# so that neither overflows into the other. Several final sums s_t are packed into one plaintext,
# the sum of s_t · 2^(128 t).

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


CIPHER_BYTES = 16


class PlainKeys(Keys):
    """Implements ``Keys`` without encryption, for trials in which the passive parties may read all
    gradients.
    """

    public = b""

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        return (
            np.stack([g_N, h_N], axis=1)
            .astype("<i8")
            .view(np.uint8)
            .reshape(len(g_N), CIPHER_BYTES)
        )

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        pairs = _decode_pairs(wire)[:count]
        return pairs[:, 0].copy(), pairs[:, 1].copy()


class PlainAdder(Adder):
    """Implements ``Adder`` for unencrypted pairs, exactly, in int64."""

    pays_from = 1 << 21

    def check(self, wire_N: Wire) -> None:
        _decode_pairs(wire_N)

    def load(self, wire_N: Wire) -> Integers:
        return _decode_pairs(wire_N)

    def sums(self, held: Integers, places_P: Integers, ends_G: Integers) -> Integers:
        return np.add.reduceat(held[places_P], np.concatenate([[0], ends_G[:-1]]))

    def zero(self) -> Integers:
        return np.zeros((1, 2), np.int64)

    def take(self, held: Integers, places: Sequence[int]) -> Integers:
        return held[list(places)]

    def add(self, a_M: Integers, b_M: Integers) -> Integers:
        return a_M + b_M

    def concatenate(self, parts: Sequence[Integers]) -> Integers:
        return np.concatenate(list(parts))

    def wire(self, held: Integers) -> Wire:
        """Unencrypted pairs are neither masked nor packed."""
        return self.raw(held)

    def raw(self, held: Integers) -> Wire:
        return held.astype("<i8").view(np.uint8).reshape(len(held), CIPHER_BYTES)


def _decode_pairs(wire_N: Wire) -> Integers:
    pairs = np.ascontiguousarray(wire_N).view("<i8").astype(np.int64).reshape(len(wire_N), 2)
    if (pairs >= LIMIT).any() or (pairs <= -LIMIT).any() or (pairs[:, 1] < 0).any():
        raise CipherError("it is a number out of range")
    return pairs
