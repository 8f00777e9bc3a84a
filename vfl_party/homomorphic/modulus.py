"""What can be seen of a public key's n without its factors."""

from __future__ import annotations

from functools import cache

import gmpy2

from vfl_party.homomorphic.scheme import CipherError

# N has no prime factor below it: those of a true key are far larger.
SMALL = 1 << 16


def check_modulus(n: int, bits: int, extra: int = 0) -> None:
    """Raises CipherError unless n can be the modulus of a key of ``bits`` bits: odd, and of about
    that size.

    ``extra``: how many bits more or fewer it may have. A power of a smaller number and a number
    with small factors are no moduli either. Whether n is what the scheme wants (p q, or p² q)
    cannot be seen from outside.
    """
    if abs(n.bit_length() - bits) > extra or n % 2 == 0:
        about = "about " if extra else ""
        raise CipherError(f"its public key is no odd number of {about}{bits} bits")
    if gmpy2.is_power(n) or gmpy2.gcd(n, _small()) != 1:
        raise CipherError("its public key is a power, or has a small factor")


@cache
def _small() -> gmpy2.mpz:
    """Returns the product of all small primes."""
    return gmpy2.primorial(SMALL)
