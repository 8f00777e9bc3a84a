"""The Merkle tree over a record's lines (RFC 9162, Certificate Transparency 2.0, section 2.1).

This module computes roots, and proofs that one tree is the beginning of another. The hashes of
complete subtrees are stored in the order in which they are computed: each leaf, then every subtree
that the leaf completes. So a growing tree only appends hashes, and a root or a proof reads about
log2(n) of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256

HASH_BYTES = 32
EMPTY = sha256().digest()

# A function that returns the stored hash at an index.
HashReader = Callable[[int], bytes]


def leaf_hash(line: bytes) -> bytes:
    """Returns the hash of a leaf (RFC 9162, section 2.1.1)."""
    return sha256(b"\0" + line).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Returns the hash of the parent of two nodes."""
    return sha256(b"\1" + left + right).digest()


def place(level: int, number: int) -> int:
    """Returns the index at which the hash of a complete subtree is stored.

    ``number``: The number of the subtree among the subtrees of 2^level leaves, from 0.
    """
    for _ in range(level):
        number = 2 * number + 1
    position = level
    while number:
        position += number
        number >>= 1
    return position


def count_hashes(size: int) -> int:
    """Returns the number of stored hashes for a tree of ``size`` leaves."""
    return 0 if size == 0 else place(0, size - 1) + 1 + _count_completed(size - 1)


def _count_completed(leaf: int) -> int:
    """Returns the number of subtrees that the leaf with this number completes, without itself."""
    return (~leaf & (leaf + 1)).bit_length() - 1


def hashes_of_leaf(leaf: bytes, number: int, hash_at: HashReader) -> list[bytes]:
    """Returns the hashes to store when a leaf is added to a tree of ``number`` leaves."""
    hashes = [leaf]
    for level in range(_count_completed(number)):
        left = hash_at(place(level, (number >> level) - 1))
        hashes.append(node_hash(left, hashes[-1]))
    return hashes


def root(size: int, hash_at: HashReader) -> bytes:
    """Returns the root of the tree over the first ``size`` leaves: MTH(D[size]) of the RFC."""
    return _compute_root(0, size, hash_at) if size else EMPTY


def consistency(old: int, new: int, hash_at: HashReader) -> list[bytes]:
    """Returns the proof that a tree of ``new`` leaves begins with the tree of its ``old`` leaves.

    This is PROOF(old, D[new]) of section 2.1.4.1, with 0 < old <= new.
    """
    return _compute_proof(old, 0, new, True, hash_at) if old < new else []


def is_consistent(
    old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]
) -> bool:
    """Returns whether a proof shows that the new tree begins with the old tree (section 2.1.4.2).

    An empty tree is the beginning of every tree.
    """
    if not 0 <= old <= new:
        return False
    if old == 0 or old == new:
        return not proof and (old == 0 or old_root == new_root)
    path = [*proof]
    if old & (old - 1) == 0:
        path.insert(0, old_root)
    if not path:
        return False
    fn, sn = old - 1, new - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = path[0]
    for digest in path[1:]:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            fr, sr = node_hash(digest, fr), node_hash(digest, sr)
            while fn and not fn & 1:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = node_hash(sr, digest)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and fr == old_root and sr == new_root


def inclusion(number: int, size: int, hash_at: HashReader) -> list[bytes]:
    """Returns the proof that leaf ``number`` is in the tree of ``size`` leaves.

    This is PATH(number, D[size]) of section 2.1.3.1.
    """
    proof: list[bytes] = []
    low, high = 0, size
    while high - low > 1:
        middle = low + _split_size(high - low)
        if number < middle:
            proof.append(_compute_root(middle, high, hash_at))
            high = middle
        else:
            proof.append(_compute_root(low, middle, hash_at))
            low = middle
    return proof[::-1]


def is_included(number: int, size: int, leaf: bytes, head: bytes, proof: Sequence[bytes]) -> bool:
    """Returns whether a proof shows that leaf ``number`` is in a tree (section 2.1.3.2).

    ``head``: The root of the tree.
    """
    if not 0 <= number < size:
        return False
    fn, sn, computed = number, size - 1, leaf
    for digest in proof:
        if sn == 0:
            return False
        if fn & 1 or fn == sn:
            computed = node_hash(digest, computed)
            while fn and not fn & 1:
                fn, sn = fn >> 1, sn >> 1
        else:
            computed = node_hash(computed, digest)
        fn, sn = fn >> 1, sn >> 1
    return sn == 0 and computed == head


def _split_size(leaves: int) -> int:
    """Returns the largest power of two that is less than ``leaves``, for at least two leaves."""
    return 1 << (leaves - 1).bit_length() - 1


def _compute_root(low: int, high: int, hash_at: HashReader) -> bytes:
    """Returns the root of the subtree over the leaves from ``low`` to ``high``."""
    leaves = high - low
    if leaves & (leaves - 1) == 0:
        level = leaves.bit_length() - 1
        return hash_at(place(level, low >> level))
    middle = low + _split_size(leaves)
    return node_hash(_compute_root(low, middle, hash_at), _compute_root(middle, high, hash_at))


def _compute_proof(old: int, low: int, high: int, whole: bool, hash_at: HashReader) -> list[bytes]:
    """Returns SUBPROOF(old, D[low:high], whole) of the RFC."""
    leaves = high - low
    if old == leaves:
        return [] if whole else [_compute_root(low, high, hash_at)]
    half = _split_size(leaves)
    middle = low + half
    if old <= half:
        return [
            *_compute_proof(old, low, middle, whole, hash_at),
            _compute_root(middle, high, hash_at),
        ]
    return [
        *_compute_proof(old - half, middle, high, False, hash_at),
        _compute_root(low, middle, hash_at),
    ]
