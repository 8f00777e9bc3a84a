"""No encryption, in the form of a scheme: for rehearsals, in which the passive parties may read every gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.packing import LIMIT
from vfl_party.homomorphic.scheme import CipherError, Integers, Wire

CIPHER_BYTES = 16


class PlainKeys:
    """Writes pairs as they are."""

    public = b""

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """See ``Keys``."""
        return np.stack([g_N, h_N], axis=1).astype("<i8").view(np.uint8).reshape(len(g_N), CIPHER_BYTES)

    def decrypt(self, sums_M: Wire) -> tuple[Integers, Integers]:
        """See ``Keys``."""
        pairs = _pairs(sums_M)
        return pairs[:, 0].copy(), pairs[:, 1].copy()


class PlainAdder:
    """Adds pairs as they are: exact, in int64."""

    def held(self, wire_N: Wire) -> Integers:
        """See ``Adder``."""
        return _pairs(wire_N)

    def buckets(self, held: Integers, rows: Integers, codes_NF: npt.NDArray[np.int8], size: int) -> Integers:
        """See ``Adder``."""
        columns = codes_NF.shape[1]
        found = np.zeros((2, columns * size), np.int64)
        pairs = np.ascontiguousarray(held[rows].T)  # g, then h: numpy adds in one dimension five times as fast
        for column in range(columns):
            places = column * size + codes_NF[rows, column].astype(np.int64)
            for sums, values in zip(found, pairs, strict=True):
                np.add.at(sums, places, values)
        return np.ascontiguousarray(found.T)

    def take(self, held: Integers, places: Sequence[int]) -> Integers:
        """See ``Adder``."""
        return held[list(places)]

    def add(self, a_M: Integers, b_M: Integers) -> Integers:
        """See ``Adder``."""
        return a_M + b_M

    def joined(self, parts: Sequence[Integers]) -> Integers:
        """See ``Adder``."""
        return np.concatenate(list(parts))

    def wire(self, held: Integers) -> Wire:
        """See ``Adder``; there is nothing to mask."""
        return held.astype("<i8").view(np.uint8).reshape(len(held), CIPHER_BYTES)


def _pairs(wire_N: Wire) -> Integers:
    pairs = np.ascontiguousarray(wire_N).view("<i8").astype(np.int64).reshape(len(wire_N), 2)
    if (pairs >= LIMIT).any() or (pairs <= -LIMIT).any() or (pairs[:, 1] < 0).any():
        raise CipherError("it is a number out of range")
    return pairs
