"""Hashes ids to points of Curve25519 and masks them with secrets. The order of two masks does not
matter: ``mask(mask(h, a), b) == mask(mask(h, b), a)``.

A point is given by its u-coordinate, 32 bytes, little-endian. Several points are concatenated in
one ``bytes`` object. Sources: RFC 7748 (the curve, X25519), draft-wang-ppm-ecdh-psi (private set
intersection with it), and RFC 9380, appendix A (try-and-increment).

Half of all numbers below p are u-coordinates of points of the curve. The other half belong to its
twist. X25519 accepts both and maps each of the two sets to itself. So a hash that is used as a
u-coordinate without a check discloses one bit of each id through all masks. ``hash_ids`` returns
only points of the curve, and ``check_points`` refuses all other numbers.
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
# The constants as gmpy2 numbers, for faster arithmetic.
_FIELD, _A = gmpy2.mpz(_P), gmpy2.mpz(486662)
_BELOW_2_255 = 2**255 - 1
# The u-coordinates of all points of order 1, 2, 4 and 8. X25519 maps each of them to zero.
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
    result is the first try that is a u-coordinate of the curve; two tries are needed on average.
    The time depends on the id, but other machines cannot observe the time of a single id.

    Args:
        ids: The ids in UTF-8.
        salt: The salt, the same at all parties.
    """
    prefix = _DOMAIN + len(salt).to_bytes(4, "little") + salt
    # The number of a try is one byte. All 256 tries fail with probability 2^-256.
    prefixes = [prefix + bytes([number]) for number in range(256)]
    return b"".join(_hash_id(identifier, prefixes) for identifier in ids)


def _hash_id(identifier: bytes, prefixes: list[bytes]) -> bytes:
    for prefix in prefixes:
        u = (
            int.from_bytes(hashlib.sha512(prefix + identifier).digest()[:POINT_BYTES], "little")
            & _BELOW_2_255
        )
        if u < _P and _is_on_curve(u):
            return u.to_bytes(POINT_BYTES, "little")
    raise AssertionError("none of 256 hashes of an id is a point of the curve")


def _is_on_curve(u: int) -> bool:
    """Returns whether v^2 = u^3 + A u^2 + u has a solution with v other than 0, modulo p."""
    x = gmpy2.mpz(u)
    return bool(gmpy2.jacobi(x * (x * (x + _A) + 1), _FIELD) == 1)


def mask(points: bytes, secret: bytes) -> bytes:
    """Multiplies each point by the secret with X25519, which also clears the cofactor.

    Args:
        points: Points from ``hash_ids``, or points that passed ``check_points``.
        secret: 32 random bytes.
    """
    key = X25519PrivateKey.from_private_bytes(secret)
    multiply, load_key = key.exchange, X25519PublicKey.from_public_bytes
    return b"".join([multiply(load_key(point)) for point in _iterate_points(points)])


def check_points(points: bytes, party: str) -> None:
    """Raises PeerError (MALFORMED_MESSAGE) unless the points from ``party`` are valid.

    Each point must be the canonical u-coordinate of a point of the curve and not of small order,
    and no point may occur twice. The caller must check for points that repeat across calls.
    """
    if len(points) % POINT_BYTES:
        raise _make_error(
            party, f"{len(points)} bytes of points, which is not a multiple of {POINT_BYTES}"
        )
    distinct = set()
    for point in _iterate_points(points):
        u = int.from_bytes(point, "little")
        if u >= _P:
            raise _make_error(party, "a point that is not a canonical number below 2^255 - 19")
        if u in _SMALL_ORDER:
            raise _make_error(
                party, "a point that is zero or of small order, which cannot be masked"
            )
        if not _is_on_curve(u):
            raise _make_error(party, "a point that is not on the curve")
        distinct.add(point)
    if len(distinct) * POINT_BYTES != len(points):
        raise _make_error(party, "the same point twice")


def cut_tags(points: bytes) -> bytes:
    """Returns the first ``TAG_BYTES`` bytes of each point, which are enough to compare points.

    Masked points are distributed evenly, so two different points have the same tag with probability
    2^-96. With 2^24 points per party, one run in 2^48 has a false match.
    """
    return b"".join(
        [points[start : start + TAG_BYTES] for start in range(0, len(points), POINT_BYTES)]
    )


def _iterate_points(points: bytes) -> Iterator[bytes]:
    return (points[start : start + POINT_BYTES] for start in range(0, len(points), POINT_BYTES))


def _make_error(party: str, problem: str) -> PeerError:
    return PeerError(
        Code.MALFORMED_MESSAGE,
        (f"{party}: sent {problem}. Install the same version of this program at all parties."),
        party=party,
    )
