"""Homomorphic sums are those of the numbers, and nothing that a peer sends breaks a scheme."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.homomorphic import (
    Adder,
    CipherError,
    Encryption,
    Keys,
    bucket_sums,
    check,
    cipher_bytes,
    ciphers_for,
    count_sums_per_cipher,
    has_heu,
    heu,
    make_adder,
    make_keys,
    worker,
)
from vfl_party.homomorphic.heu import PublicNumbers
from vfl_party.homomorphic.scheme import LIMIT, apart, pack, unpack

BITS = 1024
Pair = tuple[Keys, bytes, Adder]
KINDS: list[tuple[Encryption, bool]] = [
    ("none", False),
    ("ou", True),
    ("paillier", True),
    ("paillier", False),
]
NAMES = ["none", "ou", "paillier-heu", "paillier-gmpy2"]


@pytest.fixture(scope="module", params=range(4), ids=NAMES)
def pair(request: pytest.FixtureRequest) -> tuple[Encryption, Keys, bytes, Adder]:
    scheme, with_heu = KINDS[request.param]
    if with_heu:
        pytest.importorskip("heu")
    keys, public = make_keys(scheme, BITS, with_heu=with_heu)
    return scheme, keys, public, make_adder(scheme, BITS, public)


@cache
def made(scheme: Encryption, bits: int) -> bytes:
    """A public key, as HEU writes it; making one takes a process."""
    written, _ = worker.make_key_pair(scheme, bits)
    return written


def numbers(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.integers(-(2**45), 2**45, count), draw.integers(0, 2**43, count)


def test_buckets_and_sums_are_those_of_the_numbers(
    pair: tuple[Encryption, Keys, bytes, Adder],
) -> None:
    scheme, keys, _, adds = pair
    g, h = numbers(60)
    codes = np.random.default_rng(1).integers(0, 5, (60, 3)).astype(np.int8)
    rows = np.arange(0, 60, 2)
    wire = keys.encrypt(g, h)
    assert wire.shape == (60, cipher_bytes(scheme, BITS))
    # Code 5 is empty.
    buckets = bucket_sums(adds, adds.load(wire), rows, codes, 6)
    more = adds.add(adds.take(buckets, [0, 7]), adds.take(buckets, [12, 5]))
    sums = adds.wire(adds.concatenate([buckets, more]))
    assert len(sums) == ciphers_for(20, count_sums_per_cipher(scheme, BITS))
    # Torch warns of others.
    assert sums.flags.writeable
    assert wire.flags.writeable
    got = np.stack(keys.decrypt(sums, 20), axis=1)
    want = np.zeros((18, 2), np.int64)
    for column in range(3):
        np.add.at(want, column * 6 + codes[rows, column], np.stack([g, h], axis=1)[rows])
    assert (got == np.concatenate([want, want[[0, 7]] + want[[12, 5]]])).all()


@pytest.mark.parametrize("columns", [1, 2, 5])
# 120 rows are enough to add up pairs of columns of 3 codes, not of 40.
@pytest.mark.parametrize("size", [3, 40])
def test_buckets_are_the_same_one_column_or_two_at_a_time(
    columns: int,
    size: int,
    pair: tuple[Encryption, Keys, bytes, Adder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheme, keys, _, adds = pair
    g, h = numbers(120)
    codes = np.random.default_rng(columns).integers(0, size - 1, (120, columns)).astype(np.int8)
    codes[:, 0] = 1
    rows = np.random.default_rng(2).permutation(120)[:100]
    want = np.zeros((columns * size, 2), np.int64)
    for column in range(columns):
        np.add.at(
            want, column * size + codes[rows, column].astype(int), np.stack([g, h], axis=1)[rows]
        )
    held = adds.load(keys.encrypt(g, h))
    for at_once in (1, 1 << 21):
        monkeypatch.setattr("vfl_party.homomorphic.sums._AT_ONCE", at_once)
        got = keys.decrypt(adds.wire(bucket_sums(adds, held, rows, codes, size)), columns * size)
        assert (np.stack(got, axis=1) == want).all(), (scheme, at_once)


def test_an_encryption_is_never_the_same_twice(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, keys, _, adds = pair
    g, h = numbers(4)
    first, second = keys.encrypt(g, h), keys.encrypt(g, h)
    assert (first == second).all() == (scheme == "none")
    # Masked by a zero.
    assert (adds.wire(adds.load(first[:1])) == first[:1]).all() == (scheme == "none")


@pytest.mark.parametrize("fill", [0, 255])
def test_a_ciphertext_out_of_range_is_refused(
    fill: int, pair: tuple[Encryption, Keys, bytes, Adder]
) -> None:
    scheme, keys, _, adds = pair
    wire = keys.encrypt(*numbers(3)).copy()
    wire[1] = fill
    if scheme == "none" and fill == 0:
        # A pair of zeros is a pair.
        return
    for reads in (adds.load, lambda wire: keys.decrypt(wire, 3)):
        with raises(CipherError):
            reads(wire)


def test_a_sum_of_another_key_is_refused(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, _, public, adds = pair
    if scheme == "none":
        return
    other, _ = make_keys(scheme, BITS, with_heu=public[:1] == b"H")
    wire = adds.wire(adds.load(pair[1].encrypt(*numbers(3)))).copy()
    # Below both moduli.
    wire[:, -3:] = 0
    with raises(CipherError):
        other.decrypt(wire, 3)


@pytest.mark.parametrize("scheme", ["ou", "paillier"])
@pytest.mark.parametrize("bad", [b"", b"X", b"H", b"G", b"H" + b"\xff" * 400, b"G" + b"\xff" * 10])
def test_a_key_that_is_none_is_refused(scheme: Encryption, bad: bytes) -> None:
    with raises(CipherError):
        make_adder(scheme, BITS, bad)


@pytest.mark.parametrize("change", ["even", "short", "long"])
def test_a_wrong_paillier_key_is_refused(change: str) -> None:
    _, public = make_keys("paillier", BITS, with_heu=False)
    key = bytearray(public)
    if change == "even":
        key[1] &= 0xFE
    elif change == "short":
        key[BITS // 8] = 0
    else:
        key.append(1)
    with raises(CipherError):
        make_adder("paillier", BITS, bytes(key))


@pytest.mark.parametrize("what", ["power", "square", "small factor"])
def test_a_paillier_key_that_hides_nothing_is_refused(what: str) -> None:
    """Such numbers are odd and of the right size; a mask modulo their squares can be divided out
    again.
    """
    # Of 1,024 bits.
    power = 3**646
    # A prime.
    root = (1 << (BITS // 2)) - 569
    n = {"power": power, "square": root * root, "small factor": 65521 * ((1 << (BITS - 16)) + 1)}[
        what
    ]
    assert n.bit_length() == BITS
    assert n % 2
    with raises(CipherError):
        make_adder("paillier", BITS, b"G" + n.to_bytes(BITS // 8, "little"))


@pytest.mark.parametrize(
    ("scheme", "bits"), [("ou", 1024), ("ou", 2048), ("paillier", 1024), ("paillier", 2048)]
)
def test_a_key_crosses_as_numbers_and_heu_reads_what_was_written_here(
    scheme: Encryption, bits: int
) -> None:
    pytest.importorskip("heu")
    written = made(scheme, bits)
    numbers = PublicNumbers.of_heu(scheme, bits, written)
    assert PublicNumbers.read(scheme, bits, numbers.wire()) == numbers
    # With OU, its bits and the end, of a prime that no other party knows.
    plaintext = 10 if scheme == "ou" else 0
    assert numbers.for_heu()[: len(written) - plaintext] == written[: len(written) - plaintext]
    assert len(numbers.for_heu()) == len(written)
    with raises(CipherError):
        PublicNumbers.read(scheme, bits, written)


@pytest.mark.parametrize("scheme", ["ou", "paillier"])
@pytest.mark.parametrize("base", ["zero", "one", "too large", "shared"])
def test_a_key_with_a_base_that_cannot_be_never_reaches_heu(
    scheme: Encryption, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused in the process that holds the data before a parser in C++ has seen a byte of
    it.
    """
    library = pytest.importorskip("heu.phe")
    written = made(scheme, BITS)
    key = PublicNumbers.of_heu(scheme, BITS, written)
    wrong = {"zero": 0, "one": 1, "too large": key.modulus, "shared": key.n}[base]
    bad = replace(key, bases=(*key.bases[:-1], wrong))
    monkeypatch.setattr(
        library, "PublicKey", Mock(load_from=Mock(side_effect=AssertionError("parsed")))
    )
    with raises(CipherError):
        make_adder(scheme, BITS, b"H" + bad.wire())


def test_a_key_of_another_size_is_refused(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    scheme, _, public, _ = pair
    if scheme != "none":
        with raises(CipherError):
            make_adder(scheme, 2048, public)


def test_packing_keeps_sums_apart() -> None:
    g, h = np.array([-(LIMIT - 1), LIMIT - 1, -1, 0]), np.array([LIMIT - 1, 0, LIMIT - 1, 0])
    got_g, got_h = unpack(pack(g, h))
    assert (got_g == g).all()
    assert (got_h == h).all()
    for wrong in (LIMIT << 64, -LIMIT << 64, LIMIT, 1 << 200):
        with pytest.raises(CipherError):
            unpack([wrong])


@pytest.mark.parametrize(("count", "ciphers"), [(1, 1), (5, 5), (7, 3), (9, 3), (10, 1)])
def test_sums_that_share_a_plaintext_come_apart(count: int, ciphers: int) -> None:
    draw = np.random.default_rng(count)
    sums = pack(draw.integers(1 - LIMIT, LIMIT, count), draw.integers(0, LIMIT, count))
    shared = [
        sum(value << (128 * place) for place, value in enumerate(sums[at::ciphers]))
        for at in range(ciphers)
    ]
    assert apart(shared, count) == sums
    with raises(CipherError):
        apart([*shared[:-1], shared[-1] + (1 << (128 * -(-count // ciphers)))], count)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "heu.numpy", None)
    with raises(InputError, Code.CONFIG_INVALID, names=("3.11", "0.5")):
        check("ou", "recipe: phases: x")
    keys, public = make_keys("paillier", BITS, with_heu=True)
    assert public[:1] == b"G"
    assert (keys.decrypt(keys.encrypt(*numbers(1)), 1)[1] == numbers(1)[1]).all()


@pytest.mark.parametrize("scheme", ["ou", "paillier"])
def test_other_threads_run_between_the_pieces_of_long_work(
    scheme: Encryption, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("heu")
    keys, public = make_keys(scheme, BITS, with_heu=True)
    adds, count, codes = make_adder(scheme, BITS, public), 200, np.zeros((200, 3), np.int8)
    g, h = numbers(count)
    whole = bucket_sums(adds, adds.load(keys.encrypt(g, h)), np.arange(count), codes, 1)
    # Each piece is as small as can be.
    monkeypatch.setattr(heu, "SECONDS", 1e-6)
    monkeypatch.setattr("vfl_party.homomorphic.heu.FAST", 16)
    adds = make_adder(scheme, BITS, public)
    beats, stop = [0], Event()

    def beat() -> None:
        while not stop.is_set():
            beats[0] += 1
            stop.wait(1e-4)

    thread = Thread(target=beat)
    thread.start()
    try:
        seen = {}
        held = adds.load(keys.encrypt(g, h))
        works: dict[str, Any] = {
            "encrypt": lambda: keys.encrypt(g[:100], h[:100]),
            "buckets": lambda: bucket_sums(adds, held, np.arange(count), codes, 1),
            "add": lambda: adds.add(held, held),
            "wire": lambda: adds.wire(held),
            "decrypt": lambda: keys.decrypt(keys.encrypt(g[:50], h[:50]), 50),
        }
        for name, work in works.items():
            before = beats[0]
            work()
            seen[name] = beats[0] - before
    finally:
        stop.set()
        thread.join()
    assert min(seen.values()) > 20, seen
    sums = np.stack(keys.decrypt(adds.wire(works["buckets"]()), 3), axis=1)
    assert (sums == np.stack(keys.decrypt(adds.wire(whole), 3), axis=1)).all()
    assert (sums == [[g.sum(), h.sum()]] * 3).all()


def test_a_pace_takes_as_much_as_fits_into_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sizes = [0.0], list[int]()
    monkeypatch.setattr("vfl_party.homomorphic.heu.time.monotonic", lambda: now[0])
    monkeypatch.setattr("vfl_party.homomorphic.heu.time.sleep", lambda _: None)
    pace, seconds = heu.Pace(16), 1 / 1024
    for piece in pace.pieces(5_000):
        sizes.append(piece.stop - piece.start)
        now[0] += seconds * sizes[-1] * (8 if len(sizes) == 6 else 1)
    assert sizes[:6] == [16, 64, 256, 256, 256, 256]
    # After a slow one.
    assert sizes[6:8] == [32, 128]
    assert sum(sizes) == 5_000


def test_no_rows_have_sums_of_zero(pair: tuple[Encryption, Keys, bytes, Adder]) -> None:
    _, keys, _, adds = pair
    held = adds.load(keys.encrypt(*numbers(3)))
    none = bucket_sums(adds, held, np.empty(0, np.int64), np.zeros((3, 2), np.int8), 4)
    assert [each.tolist() for each in keys.decrypt(adds.wire(none), 8)] == [[0] * 8] * 2


def test_a_key_of_another_scheme_is_refused() -> None:
    pytest.importorskip("heu")
    _, public = make_keys("ou", BITS, with_heu=True)
    with raises(CipherError, names=("390", "384")):
        make_adder("paillier", BITS, public)
    _, public = make_keys("paillier", BITS, with_heu=True)
    with raises(CipherError, names=("384", "390")):
        make_adder("ou", BITS, public)


def test_a_key_that_heu_cannot_compute_with_is_one_sentence() -> None:
    pytest.importorskip("heu")
    keys, public = make_keys("ou", BITS, with_heu=True)
    adds = make_adder("ou", BITS, public)
    held = adds.load(keys.encrypt(*numbers(3)))
    evaluator = Mock()
    for name in ("add", "mul", "batch_select_sum"):
        getattr(evaluator, name).side_effect = RuntimeError("mp_invmod")
    adds._evaluator = evaluator  # type: ignore[attr-defined]
    codes = np.zeros((3, 1), np.int8)
    for work in (
        lambda: adds.add(held, held),
        lambda: adds.wire(held),
        lambda: bucket_sums(adds, held, np.arange(3), codes, 1),
    ):
        with raises(CipherError):
            work()


def test_a_key_process_that_fails_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with raises(InternalError, Code.INTERNAL):
        worker.make_key_pair("paillier", -1)
    assert capfd.readouterr().err


@pytest.mark.skipif(not has_heu(), reason="HEU is not installed")
def test_heu_writes_neither_among_the_events_nor_to_standard_error() -> None:
    """Its threads begin with a line on standard output, which is one JSON object a line, and nobody
    needs it.
    """
    code = """
import logging
import numpy as np
from vfl_party.homomorphic import check, make_keys
heard = []
logging.getLogger("vfl_party.homomorphic").setLevel(logging.INFO)
logging.getLogger().addHandler(type("Heard", (logging.Handler,), {"emit": lambda _, line: heard.append(line)})())
check("ou", "here")
keys, _ = make_keys("ou", 1024, with_heu=True)
keys.encrypt(np.arange(100), np.arange(100))
(line,) = heard
print(line.event, "thread_pool" in line.getMessage())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    # If HEU says nothing any more, there is nothing to keep away.
    assert done.stdout == "library True\n"
    assert not done.stderr
