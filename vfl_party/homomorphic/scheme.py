"""The interface of a scheme: the keys on one side, and the adder on the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
# Ciphertexts as they cross the wire, [N, bytes].
Wire = npt.NDArray[np.uint8]
# Ciphertexts as a scheme computes with them.
Held = Any


class CipherError(Exception):
    """A received message cannot be used; the text says why, as the end of a sentence."""


class Keys(Protocol):
    """The private key's side. A plaintext is a pair (g, h) of integers; sums of either stay below
    2^62.
    """

    @property
    def public(self) -> bytes:
        """The public key, for ``choice.adder``."""
        ...

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """Encrypts pairs, int64 [N] each, with fresh randomness; returns uint8 [N, bytes]."""
        ...

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        """Returns the ``count`` pairs of sums, int64 [count] each, that ``Adder.wire`` has packed.

        Raises CipherError if one is out of range.
        """
        ...


class Adder(Protocol):
    """The public key's side: it adds what it cannot read."""

    @property
    def pays_from(self) -> int | None:
        """The number of rows times columns from which several processes are faster; None if the
        scheme's library has its own threads.
        """
        ...

    def check(self, wire_N: Wire) -> None:
        """Raises CipherError if a ciphertext is out of range."""
        ...

    def load(self, wire_N: Wire) -> Held:
        """Returns ciphertexts to compute with. Raises CipherError if one is out of range."""
        ...

    def sums(self, held: Held, places_P: Integers, ends_G: Integers) -> Held:
        """Returns the sum of each group of ``places_P``; group g ends at ``ends_G[g]``, and none is
        empty.
        """
        ...

    def zero(self) -> Held:
        """Returns one encryption of zero, which ``wire`` will mask."""
        ...

    def take(self, held: Held, places: Sequence[int]) -> Held:
        """Returns the ciphertexts at ``places``."""
        ...

    def add(self, a_M: Held, b_M: Held) -> Held:
        """Returns the sums of ``a_M`` and ``b_M``, pair by pair."""
        ...

    def concatenate(self, parts: Sequence[Held]) -> Held:
        """Returns the ciphertexts of at least one part, one after the other."""
        ...

    def raw(self, held: Held) -> Wire:
        """Returns ciphertexts, uint8 [N, bytes], for ``load`` in another process of this party.
        They are not masked.
        """
        ...

    def wire(self, held: Held) -> Wire:
        """Returns sums for the wire, uint8 [W, bytes]: as many as fit into a ciphertext, masked by
        a fresh zero.

        With W ciphertexts, the first one contains the sums 0, W, 2 W, …: see ``packing.apart``.
        """
        ...
