"""Implements Okamoto-Uchiyama and Paillier with HEU (sf-heu), a library in C++.

HEU writes an array as msgpack: rows, columns, dimensions, then a string for each number. The string
contains the number's bytes and eight bytes that are constant for a scheme. A public key is an array
of numbers and the same eight bytes. On this project's wire, ciphertexts and keys are only numbers
of a fixed width. This module checks these numbers and converts them into HEU's format, so that HEU
parses no bytes from a peer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gmpy2
import numpy as np

from vfl_party.homomorphic import worker
from vfl_party.homomorphic.paillier import check_modulus, check_range
from vfl_party.homomorphic.scheme import (
    BITS,
    Adder,
    CipherError,
    Integers,
    Keys,
    Wire,
    apart,
    ciphers_for,
    pack,
    unpack,
)

TAILS = {"ou": bytes([1, 0, 0, 0, 0, 0, 0, 0]), "paillier": bytes([4, 0, 0, 0, 0, 0, 0, 0])}
# The product of OU's primes may be a few bits longer than the nominal key size.
EXTRA_BITS = 8


@dataclass(frozen=True)
class PublicNumbers:
    """The numbers of a public key: n and the bases with which HEU encrypts, OU's G and H or
    Paillier's h_s.

    OU's bases are below n, and Paillier's base is below n².
    """

    scheme: str
    bits: int
    n: int
    bases: tuple[int, ...]

    @property
    def modulus(self) -> int:
        """Returns the modulus of the ciphertexts."""
        return self.n if self.scheme == "ou" else self.n * self.n

    @classmethod
    def widths(cls, scheme: str, bits: int) -> list[int]:
        """Returns the number of bytes of each number on the wire."""
        return [bits // 8 + 2] * 3 if scheme == "ou" else [bits // 8, bits // 4]

    @classmethod
    def of_heu(cls, scheme: str, bits: int, written: bytes) -> PublicNumbers:
        """Returns the numbers of a public key that HEU has serialized in this process."""
        numbers, at = list[int](), 1
        for _ in cls.widths(scheme, bits):
            length, begin = _parse_string(written, at)
            at = begin + length
            numbers.append(int.from_bytes(written[begin:at], "little"))
        return cls(scheme, bits, numbers[0], tuple(numbers[1:]))

    @classmethod
    def read(cls, scheme: str, bits: int, wire: bytes) -> PublicNumbers:
        """Returns the numbers that a peer has sent. Raises CipherError if they are not a valid key
        of this scheme.
        """
        widths = cls.widths(scheme, bits)
        if len(wire) != sum(widths):
            raise CipherError(f"its public key must have {sum(widths)} bytes (got {len(wire)})")
        numbers, at = list[int](), 0
        for width in widths:
            numbers.append(int.from_bytes(wire[at : at + width], "little"))
            at += width
        key = cls(scheme, bits, numbers[0], tuple(numbers[1:]))
        check_modulus(key.n, bits, EXTRA_BITS)
        if not all(1 < base < key.modulus and gmpy2.gcd(base, key.n) == 1 for base in key.bases):
            raise CipherError(
                "its public key has a base that is out of range or shares a factor with n"
            )
        return key

    def wire(self) -> bytes:
        """Encodes the numbers for the wire."""
        widths = self.widths(self.scheme, self.bits)
        return b"".join(
            number.to_bytes(width, "little")
            for number, width in zip((self.n, *self.bases), widths, strict=True)
        )

    def for_heu(self) -> bytes:
        """Encodes the key in HEU's format: an array of the numbers, and for OU the number of bits
        of a plaintext.

        The length of OU's plaintexts is that of a prime that only the key's owner knows. The adder
        assumes a third of the key's bits.
        """
        parts = [_encode_number(number) for number in (self.n, *self.bases)]
        if self.scheme == "ou":
            parts.append(b"\xcd" + (self.bits // 3).to_bytes(2, "big"))
        return bytes([0x90 | len(parts)]) + b"".join(parts) + TAILS[self.scheme]


class HeuKeys(Keys):
    """Implements ``Keys`` with a private key of HEU. Long computations are cut into pieces.

    ``public``: The numbers of its public key for the wire.
    """

    def __init__(self, library: Any, scheme: str, bits: int, width: int) -> None:
        self._library, self._scheme, self._width = library, scheme, width
        public, private = worker.make_key_pair(scheme, bits)
        key_pair = library.phe.PublicKey.load_from(public), library.phe.SecretKey.load_from(private)
        self._kit = library.numpy.HeKit(library.phe.setup(*key_pair))
        numbers = PublicNumbers.of_heu(scheme, bits, public)
        self.public, self._modulus = numbers.wire(), numbers.modulus
        self._encoder = library.phe.BigintEncoder(schema(library, scheme))
        self._encrypting, self._decrypting = Pace(SLOW), Pace(SLOW)

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        wire = np.empty((len(g_N), self._width), np.uint8)
        for piece in self._encrypting.pieces(len(g_N)):
            plain = np.empty(piece.stop - piece.start, object)
            plain[:] = pack(g_N[piece], h_N[piece])
            ciphers = self._kit.encryptor().encrypt(self._kit.array(plain, self._encoder))
            wire[piece] = to_wire(ciphers.serialize(), len(plain), self._width)
        return wire

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        packed, bits = list[int](), BITS * -(-count // max(1, len(wire)))
        for piece in self._decrypting.pieces(len(wire)):
            sums = from_wire(self._library, wire[piece], self._modulus, TAILS[self._scheme])
            try:
                plain = self._kit.decryptor().decrypt_in_range(sums, bits).to_numpy()
            except RuntimeError:
                raise CipherError(
                    "it decrypts to a number out of range, like a ciphertext of another key"
                ) from None
            packed += map(int, plain)
        return unpack(apart(packed, count))


class HeuAdder(Adder):
    """Implements ``Adder`` with a public key of HEU. Long computations are cut into pieces, and
    HEU divides each piece among its threads.
    """

    pays_from = None

    def __init__(
        self, library: Any, scheme: str, public: bytes, bits: int, width: int, together: int
    ) -> None:
        self._library, self._scheme, self._width, self._together = library, scheme, width, together
        key = PublicNumbers.read(scheme, bits, public)
        try:
            self._kit = library.numpy.setup(library.phe.PublicKey.load_from(key.for_heu()))
        except (RuntimeError, LookupError, ValueError):
            raise CipherError("its public key cannot be used for computation") from None
        self._modulus = key.modulus
        self._evaluator = self._kit.evaluator()
        self._encoder = library.phe.BigintEncoder(schema(library, scheme))
        self._summing, self._adding, self._shifting, self._masking = (
            Pace(FAST),
            Pace(FAST),
            Pace(SLOW),
            Pace(SLOW),
        )

    def check(self, wire_N: Wire) -> None:
        check_range(wire_N, self._modulus)

    def load(self, wire_N: Wire) -> Any:
        return from_wire(self._library, wire_N, self._modulus, TAILS[self._scheme])

    def sums(self, held: Any, places_P: Integers, ends_G: Integers) -> Any:
        begins = np.concatenate([[0], ends_G[:-1]])
        room = self._summing.room
        if int((ends_G - begins).max()) <= room:
            return self._sum_groups(held, places_P, begins, ends_G)
        # A group that is too large for one piece is cut, and the sums of its parts are added up.
        counts = -(-(ends_G - begins) // room)
        firsts = np.cumsum(counts) - counts
        numbers = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        cut_begins = np.repeat(begins, counts) + room * numbers
        cut_ends = np.minimum(cut_begins + room, np.repeat(ends_G, counts))
        parts = self._sum_groups(held, places_P, cut_begins, cut_ends)
        return self._sum_groups(parts, np.arange(len(cut_ends)), firsts, firsts + counts)

    def _sum_groups(
        self, held: Any, places_P: Integers, begins_G: Integers, ends_G: Integers
    ) -> Any:
        """Returns the sums of groups. Each call of HEU gets only as many groups as fit into a
        piece.
        """
        parts, first = list[Any](), 0
        while first < len(ends_G):
            fit = int(np.searchsorted(ends_G, begins_G[first] + self._summing.room, side="right"))
            last = min(len(ends_G), max(first + 1, fit))
            begin, end = int(begins_G[first]), int(ends_G[last - 1])
            # HEU accepts only lists of Python integers.
            places = places_P[begin:end].tolist()
            groups = [
                places[a - begin : b - begin]
                for a, b in _zip_bounds(begins_G[first:last], ends_G[first:last])
            ]
            with _convert_heu_errors(), self._summing.measuring(end - begin):
                parts.append(self._evaluator.batch_select_sum(held, groups))
            first = last
        return self.concatenate(parts)

    def zero(self) -> Any:
        zero = self._kit.array(np.full(1, 0, object), self._encoder)
        with _convert_heu_errors():
            return self._kit.encryptor().encrypt(zero)

    def take(self, held: Any, places: Sequence[int]) -> Any:
        return held[[int(place) for place in places]]

    def add(self, a_M: Any, b_M: Any) -> Any:
        parts = []
        for piece in self._adding.pieces(a_M.shape[0]):
            with _convert_heu_errors():
                parts.append(self._evaluator.add(a_M[piece], b_M[piece]))
        return self.concatenate(parts)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        if len(parts) == 1:
            return parts[0]
        ends = np.cumsum([part.shape[0] for part in parts]).tolist()
        result = parts[0][[0] * ends[-1]]
        for part, end in zip(parts, ends, strict=True):
            result[end - part.shape[0] : end] = part
        return result

    def raw(self, held: Any) -> Wire:
        return to_wire(held.serialize(), held.shape[0], self._width)

    def wire(self, held: Any) -> Wire:
        packed = self._pack(held)
        wire = np.empty((packed.shape[0], self._width), np.uint8)
        for piece in self._masking.pieces(len(wire)):
            count = piece.stop - piece.start
            zeros = self._kit.array(np.full(count, 0, object), self._encoder)
            with _convert_heu_errors():
                masked = self._evaluator.add(packed[piece], self._kit.encryptor().encrypt(zeros))
            wire[piece] = to_wire(masked.serialize(), count, self._width)
        return wire

    def _pack(self, held: Any) -> Any:
        """Packs as many sums as fit into each ciphertext."""
        count = held.shape[0]
        width = ciphers_for(count, self._together)
        packed = held[slice(width * ((count - 1) // width), count)]
        missing = width - packed.shape[0]
        if missing:
            packed = self.concatenate([packed, self.zero()[[0] * missing]])
        for end in range(width * ((count - 1) // width), 0, -width):
            packed = self.add(self._shift(packed), held[slice(end - width, end)])
        return packed

    def _shift(self, held: Any) -> Any:
        """Multiplies the encrypted numbers by 2^128."""
        parts = []
        for piece in self._shifting.pieces(held.shape[0]):
            shift = self._kit.array(
                np.full(piece.stop - piece.start, 1 << BITS, object), self._encoder
            )
            with _convert_heu_errors():
                parts.append(self._evaluator.mul(held[piece], shift))
        return self.concatenate(parts)


@contextmanager
def _convert_heu_errors() -> Iterator[None]:
    """Converts an error of HEU inside the block into CipherError: a key or a ciphertext passed the
    checks but cannot be used.
    """
    try:
        yield
    except RuntimeError:
        raise CipherError("its public key or a ciphertext cannot be used for computation") from None


def _zip_bounds(begins_G: Integers, ends_G: Integers) -> Iterator[tuple[int, int]]:
    return zip(begins_G.tolist(), ends_G.tolist(), strict=True)


def from_wire(library: Any, wire_N: Wire, modulus: int, tail: bytes) -> Any:
    """Converts ciphertexts [N, bytes] into an array of HEU. Raises CipherError if a ciphertext is
    zero or not below ``modulus``.
    """
    n, width = wire_N.shape
    if not n:
        # HEU crashes on an empty array.
        raise CipherError("it contains no ciphertext")
    check_range(wire_N, modulus)
    # A zero byte for the sign precedes the tail.
    tail = b"\0" + tail
    head = bytes(
        [
            0xDA,
            *(4 + width + len(tail)).to_bytes(2, "big"),
            0x91,
            0xDA,
            *(width + 1).to_bytes(2, "big"),
        ]
    )
    body = np.empty((n, len(head) + width + len(tail)), np.uint8)
    body[:, : len(head)] = np.frombuffer(head, np.uint8)
    body[:, len(head) : -len(tail)] = wire_N
    body[:, -len(tail) :] = np.frombuffer(tail, np.uint8)
    start = bytes([0x94, 0xCE, *n.to_bytes(4, "big"), 1, 1, 0xDD, *n.to_bytes(4, "big")])
    return library.numpy.CiphertextArray.load_from(start + body.tobytes())


def to_wire(written: bytes, count: int, width: int) -> Wire:
    """Converts an array that HEU has serialized into ciphertexts for the wire, [count, width]."""
    wire = np.zeros((count, width), np.uint8)
    at = 1
    # Skips the rows, the columns and the dimensions.
    for _ in range(3):
        at += {0xCC: 2, 0xCD: 3, 0xCE: 5}.get(written[at], 1)
    at += {0xDC: 3, 0xDD: 5}.get(written[at], 1)
    for row in range(count):
        size, begin = _parse_string(written, at)
        length, number = _parse_string(written, begin + 1)
        # A byte of zeros may follow, as a sign.
        length = min(length, width)
        wire[row, :length] = np.frombuffer(written, np.uint8, length, number)
        at = begin + size
    return wire


def _parse_string(written: bytes, at: int) -> tuple[int, int]:
    """Returns the length of the msgpack string that begins at ``at``, and the position of its first
    byte.
    """
    kind = written[at]
    if kind & 0xE0 == 0xA0:
        return kind & 31, at + 1
    if kind == 0xD9:
        return written[at + 1], at + 2
    return int.from_bytes(written[at + 1 : at + 3], "big"), at + 3


def _encode_number(number: int) -> bytes:
    """Encodes a positive number in HEU's format: a msgpack string, the lowest byte first, with room
    for the sign.
    """
    length = number.bit_length() // 8 + 1
    if length < 32:
        head = bytes([0xA0 | length])
    elif length < 256:
        head = bytes([0xD9, length])
    else:
        head = bytes([0xDA]) + length.to_bytes(2, "big")
    return head + number.to_bytes(length, "little")


def schema(library: Any, scheme: str) -> Any:
    """Returns HEU's constant for a scheme."""
    return library.phe.SchemaType.OU if scheme == "ou" else library.phe.SchemaType.ZPaillier


# The seconds that a piece should take.
SECONDS = 0.25
# The seconds between two pieces, enough for all threads that wait for the lock.
REST = 0.001
# The number of items in the first piece, for items of about 10 ms (slow) or 0.01 ms (fast).
SLOW, FAST = 16, 4096
# The maximum factor by which the next piece is larger.
_GROWTH = 4


class Pace:
    """Cuts long computations into pieces, between which other threads run. Adapts the number of
    items in a piece, so that a piece takes ``SECONDS``.

    A call of HEU holds Python's global lock until it returns. Meanwhile the party cannot send
    heartbeats, without which the server considers it lost.

    ``first``: The number of items in the first piece.
    """

    def __init__(self, first: int) -> None:
        self.room = first

    def pieces(self, count: int) -> Iterator[slice]:
        """Yields slices that divide ``count`` items into pieces. The caller must finish a piece
        before it takes the next one.
        """
        start = 0
        while start < count:
            piece = slice(start, min(count, start + self.room))
            with self.measuring(piece.stop - start):
                yield piece
            start = piece.stop

    @contextmanager
    def measuring(self, items: int) -> Iterator[None]:
        """Measures the time of the block, which computes ``items`` items, and lets other threads
        run after it.
        """
        began = time.monotonic()
        yield
        elapsed_s = max(time.monotonic() - began, 1e-9)
        fitting_items = max(1, int(items * SECONDS / elapsed_s))
        if elapsed_s > SECONDS:
            self.room = min(self.room, fitting_items)
        elif 2 * items > self.room:
            self.room = max(self.room, min(fitting_items, _GROWTH * self.room))
        time.sleep(REST if 2 * elapsed_s > SECONDS else 0.0)
