"""Homomorphic sums are those of the numbers, and nothing that a peer sends breaks a scheme."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from vfl_common.errors import InputError
from vfl_party.homomorphic import Adder, CipherError, Encryption, Keys, adder, check, cipher_bytes, make_keys
from vfl_party.homomorphic.packing import LIMIT, pack, unpack

BITS = 1024
Pair = tuple[Keys, bytes, Adder]
KINDS: list[tuple[Encryption, bool]] = [("none", False), ("ou", True), ("paillier", True), ("paillier", False)]
NAMES = ["none", "ou", "paillier-heu", "paillier-gmpy2"]


@pytest.fixture(scope="module", params=range(4), ids=NAMES)
def pair(request: pytest.FixtureRequest) -> tuple[Encryption, Keys, bytes, Adder]:
    scheme, with_heu = KINDS[request.param]
    if with_heu:
        pytest.importorskip("heu")
    keys, public = make_keys(scheme, BITS, with_heu=with_heu)
    return scheme, keys, public, adder(scheme, BITS, public)


def numbers(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(-(2**45), 2**45, count), draw.integers(0, 2**43, count)


def test_buckets_and_sums_are_those_of_the_numbers(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, keys, _, adds = pair
    g, h = numbers(60)
    codes = np.random.default_rng(1).integers(0, 5, (60, 3)).astype(np.int8)
    rows = np.arange(0, 60, 2)
    wire = keys.encrypt(g, h)
    assert wire.shape == (60, cipher_bytes(scheme, BITS))
    buckets = adds.buckets(adds.held(wire), rows, codes, 6)  # code 5 is empty
    more = adds.add(adds.take(buckets, [0, 7]), adds.take(buckets, [12, 5]))
    got = np.stack(keys.decrypt(adds.wire(adds.joined([buckets, more]))), axis=1)
    want = np.zeros((18, 2), np.int64)
    for column in range(3):
        np.add.at(want, column * 6 + codes[rows, column], np.stack([g, h], axis=1)[rows])
    assert (got == np.concatenate([want, want[[0, 7]] + want[[12, 5]]])).all()


def test_an_encryption_is_never_the_same_twice(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, keys, _, adds = pair
    g, h = numbers(4)
    first, second = keys.encrypt(g, h), keys.encrypt(g, h)
    assert (first == second).all() == (scheme == "none")
    assert (adds.wire(adds.held(first)) == first).all() == (scheme == "none")  # masked by a zero


@pytest.mark.parametrize("fill", [0, 255])
def test_a_ciphertext_out_of_range_is_refused(fill: int, pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, keys, _, adds = pair
    wire = keys.encrypt(*numbers(3)).copy()
    wire[1] = fill
    if scheme == "none" and fill == 0:
        return  # a pair of zeros is a pair
    for reads in (adds.held, keys.decrypt):
        with pytest.raises(CipherError, match="number"):
            reads(wire)


def test_a_sum_of_another_key_is_refused(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, _, public, adds = pair
    if scheme == "none":
        return
    other, _ = make_keys(scheme, BITS, with_heu=public[:1] == b"H")
    wire = adds.wire(adds.held(pair[1].encrypt(*numbers(3)))).copy()
    wire[:, -3:] = 0  # below both moduli
    with pytest.raises(CipherError, match="out of range, as one of another key"):
        other.decrypt(wire)


@pytest.mark.parametrize("scheme", ["ou", "paillier"])
@pytest.mark.parametrize("bad", [b"", b"X", b"H", b"G", b"H" + b"\xff" * 400, b"G" + b"\xff" * 10])
def test_a_key_that_is_none_is_refused(scheme: Encryption, bad: bytes) -> None:
    with pytest.raises(CipherError, match="public key"):
        adder(scheme, BITS, bad)


@pytest.mark.parametrize("change", ["even", "short", "base"])
def test_a_wrong_paillier_key_is_refused(change: str) -> None:
    _, public = make_keys("paillier", BITS, with_heu=False)
    key = bytearray(public)
    if change == "even":
        key[1] &= 0xFE
    elif change == "short":
        key[BITS // 8] = 0
    else:
        key[1 + BITS // 8 :] = bytes(len(key) - 1 - BITS // 8)
    with pytest.raises(CipherError, match="public key"):
        adder("paillier", BITS, bytes(key))


def test_a_key_of_another_size_is_refused(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, _, public, _ = pair
    if scheme != "none":
        with pytest.raises(CipherError, match="public key"):
            adder(scheme, 2048, public)


def test_packing_keeps_sums_apart() -> None:
    g, h = np.array([-(LIMIT - 1), LIMIT - 1, -1, 0]), np.array([LIMIT - 1, 0, LIMIT - 1, 0])
    got_g, got_h = unpack(pack(g, h))
    assert (got_g == g).all()
    assert (got_h == h).all()
    for wrong in (LIMIT << 64, -LIMIT << 64, LIMIT, 1 << 200):
        with pytest.raises(CipherError):
            unpack([wrong])


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "heu.numpy", None)
    with pytest.raises(InputError, match=r"phases: x: .* needs HEU.*pip install sf-heu==0\.5\.2b0, or take"):
        check("ou", "recipe: phases: x")
    keys, public = make_keys("paillier", BITS, with_heu=True)
    assert public[:1] == b"G"
    assert (keys.decrypt(keys.encrypt(*numbers(1)))[1] == numbers(1)[1]).all()
