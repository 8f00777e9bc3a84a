"""The tree of a record, against the vectors of Certificate Transparency, and against a tree written
from RFC 9162 without any care for speed.
"""

from __future__ import annotations

import random
from hashlib import sha256

from vfl_party.record import tree

# Leaves and heads of the reference implementation of Certificate Transparency.
LEAVES = [
    bytes.fromhex(each)
    for each in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def mth(leaves: list[bytes]) -> bytes:
    """Section 2.1.1."""
    if not leaves:
        return sha256().digest()
    if len(leaves) == 1:
        return sha256(b"\0" + leaves[0]).digest()
    k = split(len(leaves))
    return sha256(b"\1" + mth(leaves[:k]) + mth(leaves[k:])).digest()


def split(n: int) -> int:
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def subproof(m: int, leaves: list[bytes], *, b: bool) -> list[bytes]:
    """Section 2.1.4.1."""
    n = len(leaves)
    if m == n:
        return [] if b else [mth(leaves)]
    k = split(n)
    if m <= k:
        return [*subproof(m, leaves[:k], b=b), mth(leaves[k:])]
    return [*subproof(m - k, leaves[k:], b=False), mth(leaves[:k])]


def path(m: int, leaves: list[bytes]) -> list[bytes]:
    """Section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*path(m, leaves[:k]), mth(leaves[k:])]
    return [*path(m - k, leaves[k:]), mth(leaves[:k])]


def grown(leaves: list[bytes]) -> list[bytes]:
    kept: list[bytes] = []
    for number, leaf in enumerate(leaves):
        kept += tree.hashes_of_leaf(tree.leaf_hash(leaf), number, kept.__getitem__)
        assert len(kept) == tree.count_hashes(number + 1)
    return kept


def test_heads_are_those_of_certificate_transparency() -> None:
    kept = grown(LEAVES)
    assert [tree.root(n, kept.__getitem__).hex() for n in range(1, 9)] == ROOTS
    assert tree.root(0, kept.__getitem__) == tree.EMPTY == mth([])


def test_heads_and_proofs_are_those_of_the_rfc() -> None:
    leaves = [bytes([n]) * n for n in range(34)]
    kept = grown(leaves)
    for n in range(1, len(leaves) + 1):
        head = mth(leaves[:n])
        assert tree.root(n, kept.__getitem__) == head
        for m in range(1, n + 1):
            proof = tree.consistency(m, n, kept.__getitem__)
            assert proof == subproof(m, leaves[:n], b=True)
            assert tree.is_consistent(m, n, mth(leaves[:m]), head, proof)
            inside = tree.inclusion(m - 1, n, kept.__getitem__)
            assert inside == path(m - 1, leaves[:n])
            assert tree.is_included(m - 1, n, tree.leaf_hash(leaves[m - 1]), head, inside)


def test_no_other_head_leaf_or_proof_is_taken() -> None:
    leaves = [bytes([n]) for n in range(23)]
    kept, chance = grown(leaves), random.Random(1)  # noqa: S311 - of a test
    for n in range(2, len(leaves) + 1):
        for m in range(1, n):
            old, new = mth(leaves[:m]), mth(leaves[:n])
            proof = tree.consistency(m, n, kept.__getitem__)
            place = chance.randrange(len(proof))
            changed = [*proof]
            changed[place] = sha256(changed[place]).digest()
            assert not tree.is_consistent(m, n, old, new, changed)
            assert not tree.is_consistent(m, n, new, new, proof)
            assert not tree.is_consistent(m, n, old, old, proof)
            assert not tree.is_consistent(m, n, old, new, proof[:-1])
            assert not tree.is_consistent(m, n, old, new, [*proof, old])
            assert not tree.is_consistent(n, m, new, old, proof)
            inside = tree.inclusion(m, n, kept.__getitem__)
            assert not tree.is_included(m, n, tree.leaf_hash(b"other"), new, inside)
            assert not tree.is_included(m, n, tree.leaf_hash(leaves[m]), new, inside[1:])
