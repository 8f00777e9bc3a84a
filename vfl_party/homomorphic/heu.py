"""Okamoto-Uchiyama and Paillier by HEU (sf-heu), a library in C++.

It writes an array as msgpack: rows, columns, dimensions, then a string for each number: its bytes, and eight that are
the same for all of a scheme. On our wire a ciphertext is the number alone, with a fixed width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic import worker
from vfl_party.homomorphic.packing import BITS, pack, unpack
from vfl_party.homomorphic.pieces import FAST, SLOW, Pace
from vfl_party.homomorphic.scheme import CipherError, Integers, Wire

TAILS = {"ou": bytes([1, 0, 0, 0, 0, 0, 0, 0]), "paillier": bytes([4, 0, 0, 0, 0, 0, 0, 0])}
_NAMES = {"ou": "OU", "paillier": "Z-paillier"}  # with which HEU begins the text of a key
_MODULUS = re.compile(r"\bn=([0-9A-F]+)")
_LONG = 100  # times as many rows as buckets are in a piece of sums
_EXTRA_BITS = 8  # the product of OU's primes may be a little longer than its name says


class HeuKeys:
    """A private key of HEU, and its public key as HEU writes it. Long work is cut into pieces."""

    def __init__(self, library: Any, scheme: str, bits: int, width: int) -> None:
        self._library, self._scheme, self._width = library, scheme, width
        self.public, private = worker.keys(scheme, bits)
        both = library.phe.PublicKey.load_from(self.public), library.phe.SecretKey.load_from(private)
        self._kit = library.numpy.HeKit(library.phe.setup(*both))
        self._modulus = _modulus(_n(both[0], scheme), scheme)
        self._encoder = library.phe.BigintEncoder(schema(library, scheme))
        self._encrypting, self._decrypting = Pace(SLOW), Pace(SLOW)

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        """See ``Keys``."""
        found = np.empty((len(g_N), self._width), np.uint8)
        for piece in self._encrypting.pieces(len(g_N)):
            plain = np.empty((piece.stop - piece.start, 1), object)
            plain[:, 0] = pack(g_N[piece], h_N[piece])
            ciphers = self._kit.encryptor().encrypt(self._kit.array(plain, self._encoder))
            found[piece] = to_wire(ciphers.serialize(), len(plain), self._width)
        return found

    def decrypt(self, sums_M: Wire) -> tuple[Integers, Integers]:
        """See ``Keys``."""
        found = list[int]()
        for piece in self._decrypting.pieces(len(sums_M)):
            sums = from_wire(self._library, sums_M[piece], self._modulus, TAILS[self._scheme])
            try:
                plain = self._kit.decryptor().decrypt_in_range(sums, BITS).to_numpy()
            except RuntimeError:
                raise CipherError("it decrypts to a number out of range, as one of another key does") from None
            found += map(int, plain[:, 0])
        return unpack(found)


class HeuAdder:
    """HEU with a public key. Long work is cut into pieces."""

    def __init__(self, library: Any, scheme: str, public: bytes, bits: int, width: int) -> None:
        self._library, self._scheme, self._width = library, scheme, width
        try:
            key = library.phe.PublicKey.load_from(public)
            self._kit, n = library.numpy.setup(key), _n(key, scheme)
        except (RuntimeError, LookupError, ValueError):
            raise CipherError("its public key cannot be read") from None
        self._modulus = _modulus(n, scheme)
        wide = self._modulus.bit_length() > 8 * width
        if wide or not bits - _EXTRA_BITS <= n.bit_length() <= bits + _EXTRA_BITS or n % 2 == 0:
            raise CipherError(f"its public key is no odd number of about {bits} bits")
        self._evaluator = self._kit.evaluator()
        self._encoder = library.phe.BigintEncoder(schema(library, scheme))
        self._summing, self._adding, self._masking = Pace(FAST), Pace(FAST), Pace(SLOW)

    def held(self, wire_N: Wire) -> Any:
        """See ``Adder``."""
        return from_wire(self._library, wire_N, self._modulus, TAILS[self._scheme])

    def buckets(self, held: Any, rows: Integers, codes_NF: npt.NDArray[np.int8], size: int) -> Any:
        """See ``Adder``."""
        columns, parts, begin = codes_NF.shape[1], list[Any](), 0
        if not len(rows):
            return self._zeros(columns * size)  # HEU cannot sum over no rows
        while begin < columns:
            # Many columns at once, so that a row is read once; enough rows that adding up their pieces costs little.
            together = min(len(rows), max(self._summing.room // columns, _LONG * size))
            end = min(columns, begin + max(1, self._summing.room // together))
            parts.append(self._column_sums(held, rows, np.ascontiguousarray(codes_NF[:, begin:end]), size))
            begin = end
        return self.joined(parts)

    def _column_sums(self, held: Any, rows: Integers, codes_NF: npt.NDArray[np.int8], size: int) -> Any:
        """Returns the sums of some columns, whose rows are cut if all of them take long."""
        found, begin, columns = None, 0, codes_NF.shape[1]
        while begin < len(rows):
            piece = rows[begin : begin + max(1, self._summing.room // columns - size)]
            member_N = np.zeros((1, len(codes_NF)), np.int8)
            member_N[0, piece] = 1
            with _usable(), self._summing.taking(columns * (len(piece) + size)):
                sums = self._evaluator.feature_wise_bucket_sum(held, member_N, codes_NF, size, False)
                found = sums if found is None else self._evaluator.add(found, sums)
            begin += len(piece)
        return found

    def take(self, held: Any, places: Sequence[int]) -> Any:
        """See ``Adder``."""
        return held[[int(each) for each in places]]

    def add(self, a_M: Any, b_M: Any) -> Any:
        """See ``Adder``."""
        parts = []
        for piece in self._adding.pieces(a_M.shape[0]):
            with _usable():
                parts.append(self._evaluator.add(a_M[piece, :], b_M[piece, :]))
        return self.joined(parts)

    def joined(self, parts: Sequence[Any]) -> Any:
        """See ``Adder``."""
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([each.shape[0] for each in parts]).tolist()
        whole = parts[0][[0] * ends[-1]]
        for part, end in zip(parts, ends, strict=True):
            whole[end - part.shape[0] : end, :] = part
        return whole

    def wire(self, held: Any) -> Wire:
        """See ``Adder``."""
        found = np.empty((held.shape[0], self._width), np.uint8)
        for piece in self._masking.pieces(len(found)):
            count = piece.stop - piece.start
            zeros = self._kit.array(np.full((count, 1), 0, object), self._encoder)
            with _usable():
                masked = self._evaluator.add(held[piece, :], self._kit.encryptor().encrypt(zeros))
            found[piece] = to_wire(masked.serialize(), count, self._width)
        return found

    def _zeros(self, count: int) -> Any:
        """Returns encryptions of zero, all the same until ``wire`` masks them."""
        zero = self._kit.array(np.full((1, 1), 0, object), self._encoder)
        with _usable():
            return self._kit.encryptor().encrypt(zero)[[0] * count]


@contextmanager
def _usable() -> Iterator[None]:
    """Raises CipherError if HEU cannot compute with a key that looked well, or with what it has encrypted."""
    try:
        yield
    except RuntimeError:
        raise CipherError("its public key or a ciphertext cannot be computed with") from None


def from_wire(library: Any, wire_N: Wire, modulus: int, tail: bytes) -> Any:
    """Returns HEU's array of ciphertexts. Raises CipherError if one is zero, or not below ``modulus``."""
    n, width = wire_N.shape
    if not n:
        raise CipherError("there is none")  # HEU crashes on an array of nothing
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


def schema(library: Any, scheme: str) -> Any:
    """Returns HEU's name of a scheme."""
    return library.phe.SchemaType.OU if scheme == "ou" else library.phe.SchemaType.ZPaillier


def _n(key: Any, scheme: str) -> int:
    """Returns a public key's n. Raises ValueError if it has none, or is of another scheme."""
    text = str(key)
    found = _MODULUS.search(text)
    if found is None or not text.startswith(_NAMES[scheme]):
        raise ValueError("no modulus")
    return int(found[1], 16)


def _modulus(n: int, scheme: str) -> int:
    """Returns the number below which ciphertexts are."""
    return n if scheme == "ou" else n * n
