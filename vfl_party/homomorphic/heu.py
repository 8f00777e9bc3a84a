"""Okamoto-Uchiyama and Paillier by HEU (sf-heu), a library in C++.

It writes an array as msgpack: rows, columns, dimensions, then a string for each number: its bytes, and eight that are
the same for all of a scheme. On our wire a ciphertext is the number alone, with a fixed width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.packing import BITS, pack, unpack
from vfl_party.homomorphic.scheme import CipherError, Integers, Wire

TAILS = {"ou": bytes([1, 0, 0, 0, 0, 0, 0, 0]), "paillier": bytes([4, 0, 0, 0, 0, 0, 0, 0])}
_MODULUS = re.compile(r"\bn=([0-9A-F]+)")
_EXTRA_BITS = 8  # the product of OU's primes may be a little longer than its name says


class HeuKeys:
    """A private key of HEU, and its public key as HEU writes it."""

    def __init__(self, library: Any, scheme: str, bits: int, width: int) -> None:
        self._library, self._scheme, self._width = library, scheme, width
        self._kit = library.numpy.setup(_schema(library, scheme), bits)
        self.public: bytes = self._kit.public_key().serialize()
        self._modulus = _modulus(_n(self._kit.public_key()), scheme)
        self._encoder = library.phe.BigintEncoder(_schema(library, scheme))

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """See ``Keys``."""
        plain = np.empty((len(g_N), 1), object)
        plain[:, 0] = pack(g_N, h_N)
        ciphers = self._kit.encryptor().encrypt(self._kit.array(plain, self._encoder))
        return to_wire(ciphers.serialize(), len(g_N), self._width)

    def decrypt(self, sums_M: Wire) -> tuple[Integers, Integers]:
        """See ``Keys``."""
        if not len(sums_M):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        sums = from_wire(self._library, sums_M, self._modulus, TAILS[self._scheme])
        try:
            plain = self._kit.decryptor().decrypt_in_range(sums, BITS).to_numpy()
        except RuntimeError:
            raise CipherError("it decrypts to a number out of range, as one of another key does") from None
        return unpack(int(each) for each in plain[:, 0])


class HeuAdder:
    """HEU with a public key."""

    def __init__(self, library: Any, scheme: str, public: bytes, bits: int, width: int) -> None:
        self._library, self._scheme, self._width = library, scheme, width
        try:
            key = library.phe.PublicKey.load_from(public)
            self._kit, n = library.numpy.setup(key), _n(key)
        except (RuntimeError, LookupError, ValueError):
            raise CipherError("its public key cannot be read") from None
        self._modulus = _modulus(n, scheme)
        if not bits - _EXTRA_BITS <= n.bit_length() <= bits + _EXTRA_BITS or n % 2 == 0:
            raise CipherError(f"its public key is no odd number of about {bits} bits")
        self._evaluator = self._kit.evaluator()
        self._encoder = library.phe.BigintEncoder(_schema(library, scheme))

    def held(self, wire_N: Wire) -> Any:
        """See ``Adder``."""
        return from_wire(self._library, wire_N, self._modulus, TAILS[self._scheme])

    def buckets(self, held: Any, rows: Integers, codes_NF: npt.NDArray[np.int8], size: int) -> Any:
        """See ``Adder``."""
        member_N = np.zeros((1, len(codes_NF)), np.int8)
        member_N[0, rows] = 1
        return self._evaluator.feature_wise_bucket_sum(held, member_N, np.ascontiguousarray(codes_NF), size, False)

    def take(self, held: Any, places: Sequence[int]) -> Any:
        """See ``Adder``."""
        return held[[int(each) for each in places]]

    def add(self, a_M: Any, b_M: Any) -> Any:
        """See ``Adder``."""
        return self._evaluator.add(a_M, b_M)

    def joined(self, parts: Sequence[Any]) -> Any:
        """See ``Adder``."""
        if len(parts) == 1:
            return parts[0]
        whole = np.concatenate([to_wire(each.serialize(), each.shape[0], self._width) for each in parts])
        return from_wire(self._library, whole, self._modulus, TAILS[self._scheme])

    def wire(self, held: Any) -> Wire:
        """See ``Adder``."""
        count = held.shape[0]
        zeros = self._kit.array(np.full((count, 1), 0, object), self._encoder)
        masked = self._evaluator.add(held, self._kit.encryptor().encrypt(zeros))
        return to_wire(masked.serialize(), count, self._width)


def from_wire(library: Any, wire_N: Wire, modulus: int, tail: bytes) -> Any:
    """Returns HEU's array of ciphertexts. Raises CipherError if one is zero, or not below ``modulus``."""
    n, width = wire_N.shape
    limit = modulus.to_bytes(width, "big")
    big_endian = np.ascontiguousarray(wire_N[:, ::-1])
    if any(not each.tobytes() < limit for each in big_endian) or not wire_N.any(axis=1).all():
        raise CipherError("it is not a number between zero and the key's modulus")
    tail = b"\0" + tail  # the sign
    head = bytes([0xDA, *(4 + width + len(tail)).to_bytes(2, "big"), 0x91, 0xDA, *(width + 1).to_bytes(2, "big")])
    body = np.empty((n, len(head) + width + len(tail)), np.uint8)
    body[:, : len(head)] = np.frombuffer(head, np.uint8)
    body[:, len(head) : -len(tail)] = wire_N
    body[:, -len(tail) :] = np.frombuffer(tail, np.uint8)
    start = bytes([0x94, 0xCE, *n.to_bytes(4, "big"), 1, 2, 0xDD, *n.to_bytes(4, "big")])
    return library.numpy.CiphertextArray.load_from(start + body.tobytes())


def to_wire(written: bytes, count: int, width: int) -> Wire:
    """Returns the numbers of an array that HEU has written."""
    found = np.zeros((count, width), np.uint8)
    at = 1
    for _ in range(3):  # rows, columns, dimensions
        at += {0xCC: 2, 0xCD: 3, 0xCE: 5}.get(written[at], 1)
    at += {0xDC: 3, 0xDD: 5}.get(written[at], 1)
    for row in range(count):
        size, begin = _string(written, at)
        length, number = _string(written, begin + 1)
        length = min(length, width)  # a byte of zeros may follow, as a sign
        found[row, :length] = np.frombuffer(written, np.uint8, length, number)
        at = begin + size
    return found


def _string(written: bytes, at: int) -> tuple[int, int]:
    """Returns the length of the string that begins at ``at``, and where its bytes begin."""
    kind = written[at]
    if kind & 0xE0 == 0xA0:
        return kind & 31, at + 1
    if kind == 0xD9:
        return written[at + 1], at + 2
    return int.from_bytes(written[at + 1 : at + 3], "big"), at + 3


def _schema(library: Any, scheme: str) -> Any:
    return library.phe.SchemaType.OU if scheme == "ou" else library.phe.SchemaType.ZPaillier


def _n(key: Any) -> int:
    """Returns a public key's n. Raises ValueError if it has none."""
    found = _MODULUS.search(str(key))
    if found is None:
        raise ValueError("no modulus")
    return int(found[1], 16)


def _modulus(n: int, scheme: str) -> int:
    """Returns the number below which ciphertexts are."""
    return n if scheme == "ou" else n * n
