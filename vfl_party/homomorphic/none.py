"""A scheme without encryption, for trials in which the passive parties may read all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vfl_party.homomorphic.packing import LIMIT
from vfl_party.homomorphic.scheme import CipherError, Integers, Wire

CIPHER_BYTES = 16


class PlainKeys:
    """Encodes pairs without encryption."""

    public = b""

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """See ``Keys``."""
        return (
            np.stack([g_N, h_N], axis=1)
            .astype("<i8")
            .view(np.uint8)
            .reshape(len(g_N), CIPHER_BYTES)
        )

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        """See ``Keys``."""
        pairs = _decode_pairs(wire)[:count]
        return pairs[:, 0].copy(), pairs[:, 1].copy()


class PlainAdder:
    """Adds unencrypted pairs exactly, in int64."""

    pays_from = 1 << 21

    def check(self, wire_N: Wire) -> None:
        """See ``Adder``."""
        _decode_pairs(wire_N)

    def load(self, wire_N: Wire) -> Integers:
        """See ``Adder``."""
        return _decode_pairs(wire_N)

    def sums(self, held: Integers, places_P: Integers, ends_G: Integers) -> Integers:
        """See ``Adder``."""
        return np.add.reduceat(held[places_P], np.concatenate([[0], ends_G[:-1]]))

    def zero(self) -> Integers:
        """See ``Adder``."""
        return np.zeros((1, 2), np.int64)

    def take(self, held: Integers, places: Sequence[int]) -> Integers:
        """See ``Adder``."""
        return held[list(places)]

    def add(self, a_M: Integers, b_M: Integers) -> Integers:
        """See ``Adder``."""
        return a_M + b_M

    def concatenate(self, parts: Sequence[Integers]) -> Integers:
        """See ``Adder``."""
        return np.concatenate(list(parts))

    def wire(self, held: Integers) -> Wire:
        """See ``Adder``. Unencrypted pairs are neither masked nor packed."""
        return self.raw(held)

    def raw(self, held: Integers) -> Wire:
        """See ``Adder``."""
        return held.astype("<i8").view(np.uint8).reshape(len(held), CIPHER_BYTES)


def _decode_pairs(wire_N: Wire) -> Integers:
    pairs = np.ascontiguousarray(wire_N).view("<i8").astype(np.int64).reshape(len(wire_N), 2)
    if (pairs >= LIMIT).any() or (pairs <= -LIMIT).any() or (pairs[:, 1] < 0).any():
        raise CipherError("it is a number out of range")
    return pairs
