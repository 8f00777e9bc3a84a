"""Checks a public key's n and ciphertexts as far as possible without the factors of n."""

from __future__ import annotations

from functools import cache

import gmpy2
import numpy as np

from vfl_party.homomorphic.scheme import CipherError, Wire

# n must have no prime factor below this bound. The factors of a real key are far larger.
SMALL = 1 << 16


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
