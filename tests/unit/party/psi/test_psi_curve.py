"""Ids as masked points: vectors of RFC 7748, what is on the curve by another reckoning, and what
``check`` refuses.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.errors import raises
from vfl_common.errors import Code, PeerError
from vfl_common.psi import TAG_BYTES
from vfl_party.psi.curve import POINT_BYTES, check_points, cut_tags, hash_ids, mask

P = 2**255 - 19
ONE_OF_ORDER_8 = 325606250916557431795983626356110631294008115727848805560023387167927233504
OTHER_OF_ORDER_8 = 39382357235489614581723060781553021112529911719440698176882885853963445705823
SECRETS = st.binary(min_size=32, max_size=32)
IDS = st.lists(st.binary(max_size=20), min_size=1, max_size=5, unique=True)


def each(points: bytes) -> list[bytes]:
    return [points[start : start + POINT_BYTES] for start in range(0, len(points), POINT_BYTES)]


def point(u: int) -> bytes:
    return u.to_bytes(POINT_BYTES, "little")


def on_curve(u: int) -> bool:
    """Euler's criterion."""
    return pow(u**3 + 486662 * u**2 + u, (P - 1) // 2, P) == 1


def ladder(scalar: bytes, u: int) -> int:
    """X25519 as RFC 7748, section 5, writes it."""
    k = int.from_bytes(scalar, "little") & ~7 & (2**254 - 1) | 2**254
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for bit in reversed(range(255)):
        swap ^= (k >> bit) & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swap = (k >> bit) & 1
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % P, b * b % P, d * a % P, c * b % P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % P, u * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swap:
        x2, z2 = x3, z3
    return x2 * pow(z2, P - 2, P) % P


@pytest.mark.parametrize(
    ("secret", "u", "product"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_vectors_of_rfc_7748(secret: str, u: str, product: str) -> None:
    assert mask(bytes.fromhex(u), bytes.fromhex(secret)).hex() == product


def test_a_thousand_times_as_in_rfc_7748() -> None:
    k = u = point(9)
    for _ in range(1000):
        k, u = mask(u, k), k
    assert k.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


def test_masks_as_the_ladder_does() -> None:
    points, secret = hash_ids([b"a", b"b"], b"salt"), os.urandom(32)
    expected = [ladder(secret, int.from_bytes(u, "little")) for u in each(points)]
    assert [int.from_bytes(u, "little") for u in each(mask(points, secret))] == expected


@settings(max_examples=30)
@given(IDS, SECRETS, SECRETS, SECRETS)
def test_the_order_of_the_masks_does_not_matter(
    ids: list[bytes], a: bytes, b: bytes, c: bytes
) -> None:
    points = hash_ids(ids, b"salt")
    assert mask(mask(mask(points, a), b), c) == mask(mask(mask(points, c), b), a)


@settings(max_examples=30)
@given(IDS, IDS, SECRETS, SECRETS)
def test_the_ids_in_common_are_found(
    ours: list[bytes], theirs: list[bytes], a: bytes, b: bytes
) -> None:
    mine = each(mask(mask(hash_ids(ours, b"salt"), a), b))
    others = each(mask(mask(hash_ids(theirs, b"salt"), b), a))
    assert {row for row, u in zip(ours, mine, strict=True) if u in others} == set(ours) & set(
        theirs
    )


def test_equal_ids_have_equal_points_with_one_salt_alone() -> None:
    ids = [b"%d" % number for number in range(100)]
    points = hash_ids(ids, b"salt")
    assert points == hash_ids(ids, b"salt")
    assert each(hash_ids([b"7", b"7"], b"salt")) == [each(points)[7]] * 2
    assert len({*each(points), *each(hash_ids(ids, b"other")), *each(hash_ids(ids, b""))}) == 300
    # Salt and id do not run into each other.
    assert hash_ids([b"bc"], b"a") != hash_ids([b"c"], b"ab")


def test_a_hash_stays_what_it_is() -> None:
    """Parties of two versions would find nothing in common: change the domain with the hash."""
    ids = [b"", b"person-1", "Jürgen".encode(), b"x" * 300]
    assert (
        hashlib.sha256(hash_ids(ids, b"salt")).hexdigest()[:32]
        == "9b4746ca58558cf005f30a3f7b3d1894"
    )


def test_all_points_are_on_the_curve_and_a_naive_hash_is_not() -> None:
    """One bit of the id would survive all masks: whether its point is on the curve or on the
    twist.
    """
    ids = [b"%d" % number for number in range(300)]
    points = hash_ids(ids, b"salt")
    for u in (*each(points), *each(mask(points, os.urandom(32)))):
        assert int.from_bytes(u, "little") < P
        assert on_curve(int.from_bytes(u, "little"))

    naive = [int.from_bytes(hashlib.sha256(row).digest(), "little") % 2**255 for row in ids]
    classes = [on_curve(u) for u in naive]
    assert 100 < sum(classes) < 200
    through = mask(b"".join(map(point, naive)), os.urandom(32))
    assert [on_curve(int.from_bytes(u, "little")) for u in each(through)] == classes


def test_what_is_fine_passes() -> None:
    check_points(b"", "shop")
    points = hash_ids([b"%d" % number for number in range(50)], b"salt")
    check_points(points, "shop")
    check_points(mask(points, os.urandom(32)), "shop")
    # The base point.
    check_points(point(9), "shop")


def refusal(points: bytes) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, party="shop"):
        check_points(points, "shop")


@pytest.mark.parametrize("size", [1, 31, 33])
def test_refuses_half_a_point(size: int) -> None:
    refusal(bytes(size))


@pytest.mark.parametrize("u", [P, P + 1, P + 9, 2**255 - 1, 2**255 + 9, 2**256 - 1])
def test_refuses_what_is_not_canonical(u: int) -> None:
    refusal(hash_ids([b"a"], b"") + point(u))


@pytest.mark.parametrize("u", [0, 1, ONE_OF_ORDER_8, OTHER_OF_ORDER_8])
def test_refuses_small_orders(u: int) -> None:
    assert ladder(os.urandom(32), u) == 0
    with pytest.raises(ValueError):
        mask(point(u), os.urandom(32))
    refusal(point(u))


# P - 1 has order 4 on the twist.
@pytest.mark.parametrize("u", [2, P - 1])
def test_refuses_the_twist(u: int) -> None:
    assert not on_curve(u)
    refusal(point(u))


@given(st.integers(2, P - 2))
def test_takes_a_number_if_it_is_on_the_curve(u: int) -> None:
    """hypothesis draws the constants of this file too, and so the points of order 8."""
    if not on_curve(u) or ladder(bytes(32), u) == 0:
        refusal(point(u))
    else:
        check_points(point(u), "shop")


def test_refuses_a_point_twice() -> None:
    points = hash_ids([b"a", b"b"], b"")
    refusal(points + points[:32])


def test_tags_are_the_beginnings() -> None:
    points = hash_ids([b"a", b"b"], b"")
    assert cut_tags(points) == points[:TAG_BYTES] + points[32 : 32 + TAG_BYTES]
    assert TAG_BYTES == 12
    assert cut_tags(b"") == b""


def test_imports_little() -> None:
    """Each core's worker would pay for it in memory."""
    code = "import sys, vfl_party.psi.worker; print(*sys.modules.keys() & {'torch', 'grpc', 'numpy', 'pydantic'})"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        == b"\n"
    )
