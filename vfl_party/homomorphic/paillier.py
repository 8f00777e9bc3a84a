"""Implements Paillier's scheme with gmpy2, for machines without a wheel of HEU.

An encryption is (1 + m n) · b^r mod n², where r has half the key's bits (Damgård, Jurik and
Nielsen, 2010). Powers of the base b come from tables. Each side draws its own base, because a bad
base from the key's owner would not mask. The owner of the private key computes modulo p² and q² and
combines the results (CRT).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cache, cached_property

import gmpy2
import numpy as np
import numpy.typing as npt

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

# The number of bits of an exponent that one table lookup covers.
WINDOW = 8
# An array of gmpy2's ``mpz`` numbers.
Numbers = npt.NDArray[np.object_]
# n must have no prime factor below this bound. The factors of a real key are far larger.
SMALL = 1 << 16


class Powers:
    """Computes powers of one base. A table for each window of the exponent reduces a power to one
    multiplication for each window.
    """

    def __init__(self, base: gmpy2.mpz, modulus: gmpy2.mpz, bits: int) -> None:
        self._modulus, self._tables = modulus, []
        for _ in range(-(-bits // WINDOW)):
            table = [gmpy2.mpz(1)]
            for _ in range(1 << WINDOW):
                table.append(table[-1] * base % modulus)
            base = table.pop()
            self._tables.append(table)

    def of(self, exponent: int) -> gmpy2.mpz:
        """Returns the base to the power of ``exponent``."""
        power, modulus = gmpy2.mpz(1), self._modulus
        for digit, table in zip(
            exponent.to_bytes(len(self._tables), "little"), self._tables, strict=True
        ):
            if digit:
                power = power * table[digit] % modulus
        return power


class PaillierKeys(Keys):
    """Implements ``Keys`` with two primes of the same length and their product, the public key n.
    ``width``: The number of bytes of a ciphertext.
    """

    def __init__(self, p: gmpy2.mpz, q: gmpy2.mpz) -> None:
        bits = 2 * p.bit_length()
        self._bits, self.width = bits, bits // 4
        self._p, self._q, n = p, q, p * q
        base = _draw_base(n)
        self.public = _encode(n, bits // 8)
        self._n, self._p2, self._q2 = n, p * p, q * q
        self._powers = [Powers(base % square, square, bits // 2) for square in (self._p2, self._q2)]
        self._q2_inverse = gmpy2.invert(self._q2, self._p2)
        self._q_inverse = gmpy2.invert(q, p)
        self._h_p = gmpy2.invert((gmpy2.powmod(n + 1, p - 1, self._p2) - 1) // p, p)
        self._h_q = gmpy2.invert((gmpy2.powmod(n + 1, q - 1, self._q2) - 1) // q, q)

    @classmethod
    def generate(cls, bits: int) -> PaillierKeys:
        """Makes a new key of ``bits`` bits."""
        p, q = _draw_prime(bits // 2), _draw_prime(bits // 2)
        while p == q:
            q = _draw_prime(bits // 2)
        return cls(p, q)

    @property
    def primes(self) -> tuple[gmpy2.mpz, gmpy2.mpz]:
        """Returns the two secret primes of the key."""
        return self._p, self._q

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        out = b"".join(_encode(self._encrypt(plain), self.width) for plain in pack(g_N, h_N))
        return np.frombuffer(bytearray(out), np.uint8).reshape(len(g_N), self.width)

    def _encrypt(self, plain: int) -> gmpy2.mpz:
        exponent, encoded = secrets.randbits(self._bits // 2), 1 + plain * self._n
        a = encoded % self._p2 * self._powers[0].of(exponent) % self._p2
        b = encoded % self._q2 * self._powers[1].of(exponent) % self._q2
        return b + (a - b) * self._q2_inverse % self._p2 * self._q2

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        return unpack(apart(self.plain(wire), count))

    def plain(self, wire: Wire) -> list[int]:
        """Decrypts each ciphertext, without unpacking. Raises CipherError if a ciphertext is out of
        range.
        """
        return [self._decrypt(number) for number in numbers(wire, self._n * self._n)]

    def _decrypt(self, cipher: gmpy2.mpz) -> int:
        p, q = self._p, self._q
        a = (gmpy2.powmod(cipher % self._p2, p - 1, self._p2) - 1) // p * self._h_p % p
        b = (gmpy2.powmod(cipher % self._q2, q - 1, self._q2) - 1) // q * self._h_q % q
        plain = b + (a - b) * self._q_inverse % p * q
        return int(plain if 2 * plain < self._n else plain - self._n)


class PaillierAdder(Adder):
    """Implements ``Adder``: multiplies ciphertexts modulo n², which adds their plaintexts.

    ``public``: The public key n. ``bits``: The length of n. ``together``: The number of sums in a
    ciphertext on the wire. ``width``: The number of bytes of a ciphertext.
    """

    pays_from = 1 << 10

    def __init__(self, public: bytes, bits: int, together: int) -> None:
        self.public, self.bits, self.together, self.width = public, bits, together, bits // 4
        if len(public) != bits // 8:
            raise CipherError(f"its public key must have {bits // 8} bytes (got {len(public)})")
        n = gmpy2.mpz(int.from_bytes(public, "little"))
        check_modulus(n, bits)
        self._n, self._n2 = n, n * n

    @cached_property
    def _powers(self) -> Powers:
        return Powers(_draw_base(self._n), self._n2, self.bits // 2)

    def check(self, wire_N: Wire) -> None:
        check_range(wire_N, int(self._n2))

    def load(self, wire_N: Wire) -> Numbers:
        return numbers(wire_N, self._n2)

    def sums(self, held: Numbers, places_P: Integers, ends_G: Integers) -> Numbers:
        modulus, totals, begin, ciphers = self._n2, [], 0, held[places_P].tolist()
        for end in ends_G.tolist():
            total = ciphers[begin]
            for cipher in ciphers[begin + 1 : end]:
                total = total * cipher % modulus
            totals.append(total)
            begin = end
        return _make_array(totals)

    def zero(self) -> Numbers:
        """The number 1 is an encryption of zero."""
        return _make_array([gmpy2.mpz(1)])

    def take(self, held: Numbers, places: Sequence[int]) -> Numbers:
        return held[list(places)]

    def add(self, a_M: Numbers, b_M: Numbers) -> Numbers:
        return _make_array([a * b % self._n2 for a, b in zip(a_M, b_M, strict=True)])

    def concatenate(self, parts: Sequence[Numbers]) -> Numbers:
        return np.concatenate(list(parts))

    def raw(self, held: Numbers) -> Wire:
        return self._to_wire(held.tolist())

    def wire(self, held: Numbers) -> Wire:
        return self.pack_sums(held, ciphers_for(len(held), self.together))

    def pack_sums(self, held: Numbers, count: int) -> Wire:
        """Packs and masks sums for the wire, like ``wire``, in ``count`` ciphertexts."""
        packed, modulus, shift = list[gmpy2.mpz](), self._n2, gmpy2.mpz(1) << BITS
        for first in range(count):
            *lower, total = held[first::count].tolist()
            for cipher in reversed(lower):
                total = gmpy2.powmod(total, shift, modulus) * cipher % modulus
            mask = self._powers.of(secrets.randbits(self.bits // 2))
            packed.append(total * mask % modulus)
        return self._to_wire(packed)

    def _to_wire(self, values: Sequence[gmpy2.mpz]) -> Wire:
        out = b"".join(_encode(value, self.width) for value in values)
        return np.frombuffer(bytearray(out), np.uint8).reshape(len(values), self.width)


def numbers(wire_N: Wire, modulus: gmpy2.mpz) -> Numbers:
    """Decodes ciphertexts into numbers. Raises CipherError if a ciphertext is zero, or not below
    ``modulus``.
    """
    check_range(wire_N, int(modulus))
    return _make_array(
        [gmpy2.mpz(int.from_bytes(cipher, "little")) for cipher in np.ascontiguousarray(wire_N)]
    )


def _draw_base(n: gmpy2.mpz) -> gmpy2.mpz:
    """Draws an encryption of zero. Its powers are encryptions of zero too."""
    x = gmpy2.mpz(secrets.randbelow(int(n) - 2) + 2)
    return gmpy2.powmod(n - x * x % n, n, n * n)


def _make_array(values: Sequence[gmpy2.mpz]) -> Numbers:
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _encode(value: gmpy2.mpz, width: int) -> bytes:
    return int(value).to_bytes(width, "little")


def _draw_prime(bits: int) -> gmpy2.mpz:
    """Returns a random prime of exactly ``bits`` bits that is 3 modulo 4 and has its two highest
    bits set.
    """
    while True:
        start = gmpy2.mpz(secrets.randbits(bits) | 3 << (bits - 2) | 3)
        prime = gmpy2.next_prime(start - 1)
        if prime % 4 == 3 and prime.bit_length() == bits:
            return prime


def check_modulus(n: int, bits: int, extra: int = 0) -> None:
    """Raises CipherError unless n is odd and has ``bits`` bits, no small factors, and is not a
    power of a smaller number.

    ``extra``: The number of bits by which its length may differ. Whether n has the scheme's form (p
    q, or p² q) cannot be checked without its factors.
    """
    if abs(n.bit_length() - bits) > extra or n % 2 == 0:
        about = "about " if extra else ""
        raise CipherError(f"its public key must be an odd number of {about}{bits} bits")
    if gmpy2.is_power(n) or gmpy2.gcd(n, _multiply_small_primes()) != 1:
        raise CipherError("its public key is a power or has a small factor")


@cache
def _multiply_small_primes() -> gmpy2.mpz:
    """Returns the product of all small primes."""
    return gmpy2.primorial(SMALL)


def check_range(wire_N: Wire, modulus: int) -> None:
    """Raises CipherError if a ciphertext is zero, or not below ``modulus``."""
    limit = modulus.to_bytes(wire_N.shape[1], "big")
    big_endian = np.ascontiguousarray(wire_N[:, ::-1])
    if any(not cipher.tobytes() < limit for cipher in big_endian) or not wire_N.any(axis=1).all():
        raise CipherError("it is not a number between zero and the key's modulus")
