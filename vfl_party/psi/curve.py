"""Ids as points of Curve25519, masked with secrets: ``masked(masked(h, a), b) == masked(masked(h,
b), a)``.

A point is its u-coordinate, 32 bytes, little-endian. Points stand one after the other in ``bytes``,
without anything between them. Sources: RFC 7748 (the curve, X25519), draft-wang-ppm-ecdh-psi
(private set intersection with it), and RFC 9380, appendix A (try-and-increment).

Half of all numbers below p are the u of a point of the curve; the others belong to its twist.
X25519 accepts both and never leaves the class of its input, so a hash that is used as u without a
check discloses one bit of each id through all masks. ``hash_ids`` gives only points of the curve,
and ``check`` refuses all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import gmpy2
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from vfl_common.errors import Code, PeerError
from vfl_common.psi import TAG_BYTES

POINT_BYTES = 32
_DOMAIN = b"vfl psi v1"
_P = 2**255 - 19
# Constants as gmpy2 numbers, converted once.
_FIELD, _A = gmpy2.mpz(_P), gmpy2.mpz(486662)
_BELOW_2_255 = 2**255 - 1
# The u of all points of order 1, 2, 4 and 8 on the curve; X25519 makes zero of each.
_SMALL_ORDER = frozenset(
    (
        0,
        1,
        325606250916557431795983626356110631294008115727848805560023387167927233504,
        39382357235489614581723060781553021112529911719440698176882885853963445705823,
    )
)


def hash_ids(ids: Sequence[bytes], salt: bytes) -> bytes:
    """Hashes each id to a point of the curve, by try-and-increment.

    A try is SHA-512 over a domain, the salt, the number of the try and the id, cut to 255 bits. The
    first one that is the u of a point is taken: two tries on average. The time depends on the id,
    but other machines cannot observe it for a single id.
    """
    opening = _DOMAIN + len(salt).to_bytes(4, "little") + salt
    # All 256 tries fail for 1 id in 2^256.
    openings = [opening + bytes([number]) for number in range(256)]
    return b"".join(_point(identifier, openings) for identifier in ids)


def _point(identifier: bytes, openings: list[bytes]) -> bytes:
    for opening in openings:
        u = (
            int.from_bytes(hashlib.sha512(opening + identifier).digest()[:POINT_BYTES], "little")
            & _BELOW_2_255
        )
        if u < _P and _is_on_curve(u):
            return u.to_bytes(POINT_BYTES, "little")
    raise AssertionError("no try gives a point")


def _is_on_curve(u: int) -> bool:
    """Whether v^2 = u^3 + A u^2 + u has a solution other than v = 0: the right side is a square (p
    is prime).
    """
    x = gmpy2.mpz(u)
    return bool(gmpy2.jacobi(x * (x * (x + _A) + 1), _FIELD) == 1)


def mask(points: bytes, secret: bytes) -> bytes:
    """Multiplies each point by the secret: X25519, which makes the scalar a multiple of 8 and so
    clears the cofactor.

    Args:
        points: points that ``hash_ids`` gave or that passed ``check``.
        secret: 32 random bytes.
    """
    key = X25519PrivateKey.from_private_bytes(secret)
    multiply, load = key.exchange, X25519PublicKey.from_public_bytes
    return b"".join([multiply(load(point)) for point in _each(points)])


def check(points: bytes, party: str) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) unless ``points`` can be what the peer ``party`` has
    masked.

    All must be canonical u-coordinates of points on the curve, none of small order, and different.
    The caller checks for points that repeat in different calls.
    """
    if len(points) % POINT_BYTES:
        raise _refuse(
            party, f"{len(points)} bytes of points, which is not a multiple of {POINT_BYTES}"
        )
    distinct = set()
    for point in _each(points):
        u = int.from_bytes(point, "little")
        if u >= _P:
            raise _refuse(party, "a point that is not a canonical number below 2^255 - 19")
        if u in _SMALL_ORDER:
            raise _refuse(party, "a point that is zero or of small order, which cannot be masked")
        if not _is_on_curve(u):
            raise _refuse(party, "a point that is not on the curve")
        distinct.add(point)
    if len(distinct) * POINT_BYTES != len(points):
        raise _refuse(party, "the same point twice")


def tags(points: bytes) -> bytes:
    """Cuts each point to its first ``TAG_BYTES`` bytes, which are enough to compare points.

    Masked points are spread evenly, so two different ones have equal tags with probability 2^-96.
    With 2^24 points a side, that is one run in 2^48 with a false match.
    """
    return b"".join(
        [points[start : start + TAG_BYTES] for start in range(0, len(points), POINT_BYTES)]
    )


def _each(points: bytes) -> Iterator[bytes]:
    return (points[start : start + POINT_BYTES] for start in range(0, len(points), POINT_BYTES))


def _refuse(party: str, what: str) -> PeerError:
    return PeerError(
        Code.MALFORMED_MESSAGE,
        (f"{party}: sent {what}. Install the same version of this program at all parties."),
        party=party,
    )
