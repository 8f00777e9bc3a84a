"""Defines the interface of a scheme: the keys on one side, and the adder on the other side."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def public(self) -> bytes:
        """The public key, for ``choice.adder``."""
        ...

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

        With W ciphertexts, the first one contains the sums 0, W, 2 W, …: see ``packing.apart``.
        """
        ...
