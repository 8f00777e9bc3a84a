"""The interface of a scheme: the keys of the one side, and the adder of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Wire = npt.NDArray[np.uint8]  # ciphertexts as they cross the wire, [N, bytes]
Held = Any  # ciphertexts as a scheme computes with them


class CipherError(Exception):
    """What has come cannot be used; the text says why, as the end of a sentence."""


class Keys(Protocol):
    """The private key's side. A plaintext is a pair (g, h) of integers; sums of either stay below 2^62."""

    @property
    def public(self) -> bytes:
        """The public key, for ``choice.adder``."""
        ...

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """Encrypts each pair, with fresh randomness."""
        ...

    def decrypt(self, sums_M: Wire) -> tuple[Integers, Integers]:
        """Returns the pairs of sums. Raises CipherError if one is out of range."""
        ...


class Adder(Protocol):
    """The public key's side: it adds what it cannot read."""

    def held(self, wire_N: Wire) -> Held:
        """Returns ciphertexts to compute with. Raises CipherError if one is out of range."""
        ...

    def buckets(self, held: Held, rows: Integers, codes_NF: npt.NDArray[np.int8], size: int) -> Held:
        """Returns the sums over ``rows`` of those with each code, [F * size], by column, then by code.

        ``codes_NF``: from 0 to ``size`` - 1, of all rows.
        """
        ...

    def take(self, held: Held, places: Sequence[int]) -> Held:
        """Returns the ciphertexts at ``places``."""
        ...

    def add(self, a_M: Held, b_M: Held) -> Held:
        """Returns the sums of ``a_M`` and ``b_M``, pair by pair."""
        ...

    def joined(self, parts: Sequence[Held]) -> Held:
        """Returns the ciphertexts of at least one part, one after the other."""
        ...

    def wire(self, held: Held) -> Wire:
        """Returns ciphertexts for the wire, each masked by a fresh encryption of zero."""
        ...
