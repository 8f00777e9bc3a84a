"""Private alignment with a party that breaks the protocol: the first error is one sentence that
names it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.exchanges import credentials
from tests.harness.aligning import (
    SERVER,
    Parties,
    Recorder,
    changed,
    in_common,
    sets_of,
    small_batches,
)
from tests.harness.errors import assert_names, raises
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, InterruptedRun, PeerError, VflError
from vfl_common.psi import PHASE, TAG_BYTES
from vfl_party.align import digest, exchanges, quota
from vfl_party.align.state import AlignmentFiles
from vfl_party.psi import sealed
from vfl_party.psi.curve import POINT_BYTES

Change = Callable[[bytes], bytes]
HELLO, FIRST, SECOND = StepKey(PHASE, 0, 0), StepKey(PHASE, 1, 0), StepKey(PHASE, 1, 1)
P = 2**255 - 19
BATCH = 16


small = small_batches(BATCH)


def many(first: int, count: int) -> list[str]:
    return [f"id-{number}" for number in range(first, first + count)]


def disturbed(
    folder: Path,
    parties: int,
    sender: str,
    receiver: str,
    step: StepKey,
    name: str,
    change: Change,
    **given: Any,
) -> PeerError:
    """Aligns, while ``sender`` changes one tensor that it sends at a step; returns the first error.

    All others must end, too, each with an error of ours in one line.
    """

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == (sender, receiver, step):
            return changed(bundle, name, change(bytes(bundle.tensors[name].data)))
        return bundle

    sets = sets_of(*(many(5 * number, 40 + number) for number in range(parties)))
    found, errors = Parties(folder, sets, tap=tap, **given).outcomes()
    assert not found
    # The server's is one.
    assert len(errors) == parties + 1
    for each in errors:
        assert isinstance(each, VflError), repr(each)
        assert "\n" not in str(each)
    assert isinstance(errors[0], PeerError), errors[0]
    assert not [*folder.rglob("common.bits")]
    return errors[0]


def number(value: int) -> bytes:
    return value.to_bytes(POINT_BYTES, "little")


def off_the_curve() -> int:
    """The smallest u of the twist."""
    return next(u for u in range(2, 99) if pow(u**3 + 486662 * u**2 + u, (P - 1) // 2, P) != 1)


POINTS: dict[str, tuple[Change, str]] = {
    "off the curve": (
        lambda data: number(off_the_curve()) + data[32:],
        "a point that is not on the curve",
    ),
    "zero": (lambda data: number(0) + data[32:], "a point that is zero or of small order"),
    "small order": (lambda data: data[:-32] + number(1), "a point that is zero or of small order"),
    "not canonical": (
        lambda data: number(P + 9) + data[32:],
        "a point that is not a canonical number",
    ),
    "top bit": (
        lambda data: data[:31] + bytes([data[31] | 128]) + data[32:],
        "a point that is not a canonical number",
    ),
    "twice": (lambda data: data[32:64] + data[32:], "the same point twice"),
}


@pytest.mark.parametrize("kind", POINTS)
@pytest.mark.parametrize(("liar", "peer"), [("p0", "p1"), ("p1", "p0")])
def test_points_that_cannot_be(liar: str, peer: str, kind: str, tmp_path: Path) -> None:
    change, text = POINTS[kind]
    error = disturbed(tmp_path, 2, liar, peer, FIRST, "points", change)
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, liar)
    assert str(error).startswith(f"{liar}: sent {text}")


@pytest.mark.parametrize(
    "change", [lambda data: data + data[:32], lambda data: data[32:], lambda data: data[1:]]
)
@pytest.mark.parametrize(("liar", "peer"), [("p0", "p1"), ("p1", "p0")])
def test_other_sizes_than_announced(liar: str, peer: str, change: Change, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, liar, peer, FIRST, "points", change)
    assert error.code in (Code.TENSOR_MISMATCH, Code.TENSOR_TOO_LARGE)
    assert error.party == liar
    assert_names(str(error), "512")


def test_the_same_points_in_two_batches(tmp_path: Path) -> None:
    """Within a batch there is none twice."""
    shown: list[bytes] = []

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to) != ("p1", "p0") or at not in (FIRST, SECOND):
            return bundle
        shown.append(bytes(bundle.tensors["points"].data))
        return changed(bundle, "points", shown[0])

    _, errors = Parties(tmp_path, sets_of(many(0, 40), many(5, 40)), tap=tap).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].party == "p1"
    assert_names(str(errors[0]), "p1")
    assert len(errors) == 3


def test_the_same_points_in_two_batches_of_three_parties(tmp_path: Path) -> None:
    """p2 gets p0's rows from p1, which has done no wrong."""
    shown: list[bytes] = []

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to) != ("p0", "p1") or at not in (FIRST, SECOND):
            return bundle
        shown.append(bytes(bundle.tensors["points"].data))
        return changed(bundle, "points", shown[0])

    # Whoever is first.
    for order in range(3):
        _, errors = Parties(
            tmp_path / str(order), sets_of(*(many(0, 40) for _ in range(3))), tap=tap
        ).outcomes()
        assert isinstance(errors[0], PeerError)
        assert errors[0].party == "p0"
        assert_names(str(errors[0]), "p0")
        shown.clear()


def test_points_that_are_alike_in_part_are_not_the_same(tmp_path: Path) -> None:
    kept, head = AlignmentFiles(tmp_path, ["a"], 2), bytes(range(8))
    (tmp_path / "alignment").mkdir()
    different = [head + bytes([each]) * 24 for each in range(5)]
    for batch in range(3):
        kept.add(2, batch, b"".join(different[2 * batch : 2 * batch + 2]))
    kept.require_distinct(2, "p1", 5)
    kept.add(2, 2, different[4] + different[3])
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1", party="p1"):
        kept.require_distinct(2, "p1", 6)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: bytes(len(data))]
)
def test_what_is_changed_on_its_way_does_not_open(change: Change, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 3, "p0", "p2", FIRST, "points", change)
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p1")
    assert_names(str(error), "p1")


def test_points_that_cannot_be_are_found_under_a_seal(tmp_path: Path) -> None:
    """p1 seals for p2; p0, through which it goes, sees nothing wrong."""
    keys: dict[str, sealed.KeyPair] = {}
    inner = sealed.KeyPair.seal

    def seal(self: sealed.KeyPair, peer: bytes, context: bytes, plain: bytes) -> bytes:
        keys["p1"] = self
        return inner(self, peer, context, number(off_the_curve()) + plain[32:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed.KeyPair, "seal", seal)
        sets = sets_of(many(0, 40), many(5, 40), many(9, 40))
        _, errors = Parties(tmp_path, sets).outcomes()
    assert_names(str(errors[0]), "p1")
    assert len(errors) == 4


# -- how the parties meet


def ints(*values: int) -> Change:
    return lambda _data: np.array(values, "<i8").tobytes()


@pytest.mark.parametrize("rows", [0, -1, -(2**63), 10**12, 2**63 - 1])
def test_a_passive_party_announces_rows_that_cannot_be(rows: int, tmp_path: Path) -> None:
    asks = {"p0": {"peer_rows_at_most": 10**9}}
    error = disturbed(tmp_path, 3, "p2", "p0", HELLO, "rows", ints(rows), asks=asks)
    assert error.code == (Code.REFUSED if rows > 0 else Code.MALFORMED_MESSAGE)
    assert error.party == "p2"
    assert_names(str(error), "p2")


def test_a_passive_party_announces_masked_rows_that_cannot_be(tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p1", "p0", HELLO, "masked", ints(0, -1))
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p1")
    assert_names(str(error), "p1")


@pytest.mark.parametrize(
    "rows", [(41, 41), (0, 41), (-1, 41), (10**12, 41), (40, 40), (2**63 - 1, 41)]
)
def test_the_active_party_announces_other_rows(rows: tuple[int, int], tmp_path: Path) -> None:
    asks = {"p1": {"peer_rows_at_most": 10**9}}
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "rows", ints(*rows), asks=asks)
    assert error.party == "p0"
    # Which may be, so it shows later.
    if rows != (41, 41):
        assert_names(str(error), "p0")


@pytest.mark.parametrize("first", [-1, 1, 3, 99, -(2**63)])
def test_the_active_party_would_leave_out_batches(first: int, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "first", ints(first, 0))
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p0")
    assert_names(str(error), "p0", "p1")


def test_the_active_party_says_that_the_rows_are_known(tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "known", lambda _data: b"\1")
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p0")
    assert_names(str(error), "p0")


@pytest.mark.parametrize("name", [bytes(16), b"another attempt!"])
def test_the_active_party_names_another_attempt_to_one(name: bytes, tmp_path: Path) -> None:
    """Its rows are hashed with another salt, so none is common."""
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "attempt", lambda _data: name)
    assert error.code in (Code.ROWS_DIFFER, Code.MALFORMED_MESSAGE)


# -- introductions


def framed(said: bytes) -> Change:
    return lambda data: (len(said).to_bytes(2, "little") + said).ljust(len(data), b"\0")


def introduction(name: str, context: str = "run") -> Change:
    return framed(sealed.KeyPair.new().introduction(credentials(name), context.encode()))


INTRODUCTIONS: dict[str, tuple[Change, Code, str]] = {
    "of another party": (
        introduction("p2"),
        Code.IDENTITY_MISMATCH,
        "the introduction of p1 has a certificate for 'p2'",
    ),
    "for another run": (
        introduction("p1", "run2"),
        Code.IDENTITY_MISMATCH,
        "p1: its introduction is not signed for",
    ),
    "garbage": (
        lambda data: bytes(range(256)) * (len(data) // 256),
        Code.MALFORMED_MESSAGE,
        "the introduction of p1",
    ),
    "nothing": (
        lambda data: bytes(len(data)),
        Code.MALFORMED_MESSAGE,
        "the introduction of p1 cannot be read",
    ),
}


@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_an_introduction_that_is_not_the_partys(kind: str, tmp_path: Path) -> None:
    change, code, text = INTRODUCTIONS[kind]
    error = disturbed(
        tmp_path, 3, "p1", "p0", HELLO, "introduction", change, credentials=credentials
    )
    assert (error.code, error.party) == (code, "p1")
    assert str(error).startswith(text)


def test_a_certificate_that_is_too_long_is_told_to_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sealed.KeyPair, "introduction", lambda *_: bytes(exchanges.INTRODUCTION_BYTES - 1)
    )
    found, errors = Parties(
        tmp_path, sets_of(many(0, 20), many(5, 20)), credentials=credentials
    ).outcomes()
    assert not found
    assert isinstance(errors[0], InputError)
    assert_names(str(errors[0]), "4095", "4094")


def test_introductions_in_order_are_accepted(tmp_path: Path) -> None:
    found = Parties(
        tmp_path, sets_of(many(0, 20), many(5, 20), many(9, 20)), credentials=credentials
    ).align()
    assert {tuple(each.ids) for each in found.values()} == {tuple(sorted(many(9, 11)))}


def test_the_active_party_introduces_a_key_of_its_own_for_another(tmp_path: Path) -> None:
    """Otherwise it could read what p1 seals for p2."""
    forged = introduction("p0")(bytes(exchanges.INTRODUCTION_BYTES))

    def change(data: bytes) -> bytes:
        size = exchanges.INTRODUCTION_BYTES
        return data[: 2 * size] + forged + data[3 * size :]

    error = disturbed(
        tmp_path, 3, "p0", "p1", HELLO, "introductions", change, credentials=credentials
    )
    assert (error.code, error.party) == (Code.IDENTITY_MISMATCH, "p2")
    assert_names(str(error), "p0", "p2")


# -- the server


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((41, 41), "p1 has 41 masked rows of p0, which has 40"),
        ((42, 40), "p0 has 41 masked rows of p1, which has 42"),
        ((0, 40), "p1 announces 0 rows, but an alignment needs at least one"),
        ((-1, 40), "p1 announces -1 rows, but an alignment needs at least one"),
    ],
)
def test_the_server_is_told_sizes_that_do_not_fit(
    sizes: tuple[int, int], text: str, tmp_path: Path
) -> None:
    error = disturbed(tmp_path, 2, "p1", SERVER, StepKey(PHASE, 2, 0), "sizes", ints(*sizes))
    assert (error.code, str(error)) == (Code.MALFORMED_MESSAGE, text)
    assert error.party in text


def test_the_server_is_sent_a_tag_twice(tmp_path: Path) -> None:
    tags = StepKey(PHASE, 2, 1)
    error = disturbed(
        tmp_path, 2, "p1", SERVER, tags, "tags", lambda data: data[:TAG_BYTES] + data[:-TAG_BYTES]
    )
    assert_names(str(error), "p1", "p0")
    assert error.party == "p1"


def test_the_server_names_who_sent_a_tag_twice_in_a_ring(tmp_path: Path) -> None:
    tags = StepKey(PHASE, 3, 1)
    error = disturbed(
        tmp_path, 3, "p2", SERVER, tags, "tags", lambda data: data[:TAG_BYTES] + data[:-TAG_BYTES]
    )
    assert error.party == "p2"
    assert_names(str(error), "p2", "p0")


def test_the_server_is_sent_fewer_tags(tmp_path: Path) -> None:
    error = disturbed(
        tmp_path, 2, "p1", SERVER, StepKey(PHASE, 2, 1), "tags", lambda data: data[TAG_BYTES:]
    )
    assert (error.code, error.party) == (Code.TENSOR_MISMATCH, "p1")
    assert_names(str(error), "tags", "p1")


def test_wrong_bits_from_the_server_are_found_before_training(tmp_path: Path) -> None:
    sets = sets_of(many(0, 40), many(5, 40))

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == (SERVER, "p1", StepKey(PHASE, 2, 1)):
            data = bytes(bundle.tensors["common"].data)
            return changed(bundle, "common", bytes([data[0] ^ 128]) + data[1:])
        return bundle

    parties = Parties(tmp_path, sets, tap=tap)
    found, errors = parties.outcomes()
    assert not found
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.ROWS_DIFFER
    assert_names(str(errors[0]), "everywhere")
    assert not [*tmp_path.rglob("alignment/*")]
    parties.tap = lambda _who, _to, _at, bundle: bundle
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(sets)}


# -- who makes up the list of another


def test_an_active_party_that_turns_tags_sees_nothing_of_the_list_that_it_makes(
    tmp_path: Path,
) -> None:
    """It could choose another's list of common rows, and try out ids until their digest fits."""
    record = Recorder()

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == ("p0", SERVER, StepKey(PHASE, 2, 1)):
            data = bytes(bundle.tensors["tags"].data)
            bundle = changed(bundle, "tags", data[12:] + data[:12])
        return record(who, to, at, bundle)

    found, errors = Parties(tmp_path, sets_of(many(0, 1), many(0, 40)), tap=tap).outcomes()
    assert not found
    assert isinstance(errors[0], PeerError)
    assert errors[0].code is Code.ROWS_DIFFER
    assert {each.receiver for each in record.said if "digest" in each.tensors} == {SERVER}


def test_a_list_that_is_shorter_than_wanted_is_not_compared_at_all(tmp_path: Path) -> None:
    record = Recorder()

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == (SERVER, "p1", StepKey(PHASE, 2, 1)):
            bundle = changed(
                bundle, "common", bytes([128]) + bytes(bundle.tensors["common"].data.nbytes - 1)
            )
        return record(who, to, at, bundle)

    sets = sets_of(many(0, 40), many(5, 40))
    found, errors = Parties(tmp_path, sets, rows={"at_least": 20}, tap=tap).outcomes()
    assert not found
    assert_names(str(errors[0]), "rows.at_least", "rows.id_rules")
    assert "p1" not in {each.sender for each in record.said if "digest" in each.tensors}


def test_an_attempt_is_not_for_another_set(tmp_path: Path) -> None:
    """The others would mask it with the same secrets, and show what has changed."""

    def interrupted(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == (SERVER, "p0", StepKey(PHASE, 2, 1)):
            raise InterruptedRun("stopped")
        return bundle

    parties = Parties(tmp_path, sets_of(many(0, 40), many(5, 40)), tap=interrupted)
    _, errors = parties.outcomes()
    assert isinstance(errors[0], InterruptedRun)
    state = parties.folder_of("p1") / "alignment" / "state.json"
    first = json.loads(state.read_text())["name"]

    def same_name(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == ("p0", "p1", StepKey(PHASE, 0, 0)):
            return changed(bundle, "attempt", bytes.fromhex(first))
        return bundle

    parties.sets, parties.tap = sets_of(many(0, 41), many(5, 40)), same_name
    found, errors = parties.outcomes()
    assert not found
    assert any(
        "resumes an alignment in which the parties had different numbers of rows" in str(each)
        for each in errors
    )
    assert not state.exists()


# -- the server and a party that join forces


def bits_of(*places: int, rows: int = 40) -> bytes:
    """Returns what the server sends to mark the rows at these places of the order in which a party
    shows them.
    """
    marks = np.zeros(rows, bool)
    marks[list(places)] = True
    return np.packbits(marks).tobytes()


class Colluding(Recorder):
    """A server that marks what it likes of p1's rows, and interrupts the run as soon as it has p1's
    digest.
    """

    def __init__(self, parties: int, bits: bytes, look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._parties, self._bits, self._look = parties, bits, look
        self.digest = b""

    def __call__(self, who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to, at) == (SERVER, "p1", StepKey(PHASE, self._parties, 1)):
            bundle = changed(bundle, "common", self._bits)
        if (who, to, at) == ("p1", SERVER, StepKey(PHASE, self._parties, 2)):
            self.digest = bytes(bundle.tensors["digest"].data)
            self._look()
            raise InterruptedRun("the server says so")
        return super().__call__(who, to, at, bundle)


def asking(folder: Path, parties: int, begins: Callable[[], None], **given: Any) -> Parties:
    sets = sets_of(*(many(5 * number, 40) for number in range(parties)))
    return Parties(folder, sets, asks={"p1": {"begins": begins}}, **given)


def interrupted_with(
    parties: Parties, bits: bytes, look: Callable[[], None] = lambda: None
) -> bytes:
    """Returns p1's digest of the list that the bits make."""
    parties.tap = tap = Colluding(len(parties.sets), bits, look)
    found, errors = parties.outcomes()
    assert not found
    assert errors
    return tap.digest


@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("divides", [True, False])
def test_other_bits_in_the_same_attempt_end_it_and_count(
    parties: int, divides: bool, tmp_path: Path
) -> None:
    """Each list would be one more guess at an id: of known rows, to be as many as wanted, and one
    that is not known.
    """
    counted: list[str] = []
    ring = asking(tmp_path, parties, partial(counted.append, "p1"), divides=divides)
    state = ring.folder_of("p1") / "alignment" / "state.json"

    def look() -> None:
        # On the disk before the digest is sent.
        assert json.loads(state.read_text())["marks"]

    digest_ = interrupted_with(ring, bits_of(0, 1, 2), look)
    assert digest_
    # An honest server does the same again.
    assert interrupted_with(ring, bits_of(0, 1, 2)) == digest_
    assert counted == ["p1"]
    ring.tap = tap = Colluding(parties, bits_of(0, 1, 3))
    _, errors = ring.outcomes()
    error = errors[0]
    assert isinstance(error, PeerError)
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, SERVER)
    assert_names(str(error), "alignment")
    assert not tap.digest
    assert counted == ["p1"] * 2
    assert not state.exists()
    ring.tap = lambda _who, _to, _at, bundle: bundle
    assert {tuple(each.ids) for each in ring.align().values()} == {in_common(ring.sets)}
    assert counted == ["p1"] * 3


def test_interruptions_give_no_more_guesses_than_alignments_a_day(tmp_path: Path) -> None:
    begins = partial(quota.count, tmp_path / "alignments-p1.json", "p1.csv", 5, time.time())
    ring = asking(tmp_path, 2, begins, rows={"at_least": 3})
    shown = {interrupted_with(ring, bits_of(0, 1, 2, place)) for place in range(3, 30)}
    # Every other one is refused, and counts.
    assert len(shown - {b""}) == 3


def test_the_active_party_cannot_choose_the_salt_of_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what it has tried out once would do for every alignment."""
    shown, drawn = set[bytes](), os.urandom
    monkeypatch.setattr(
        os,
        "urandom",
        lambda size: bytes(range(size)) if size == exchanges.NAME_BYTES else drawn(size),
    )
    for run in ("first", "second"):

        def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
            if (who, to, at) == ("p0", "p1", HELLO):
                return changed(bundle, "introductions", b"\1" * (2 * exchanges.INTRODUCTION_BYTES))
            if (who, to, at) == ("p1", SERVER, StepKey(PHASE, 2, 2)):
                shown.add(bytes(bundle.tensors["digest"].data))
            return bundle

        found, errors = Parties(
            tmp_path / run, sets_of(many(0, 40), many(0, 40)), tap=tap
        ).outcomes()
        assert not found
        assert_names(str(errors[0]), "everywhere")
    assert len(shown) == 2


def test_an_attempt_of_an_earlier_name_has_another_salt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, shown, drawn = (
        itertools.cycle([bytes(range(16)), bytes(range(1, 17))]),
        set[bytes](),
        os.urandom,
    )
    monkeypatch.setattr(
        os, "urandom", lambda size: next(names) if size == exchanges.NAME_BYTES else drawn(size)
    )
    parties = Parties(tmp_path, sets_of(many(0, 40), many(0, 40)))
    for _ in range(3):
        shown.add(interrupted_with(parties, bits_of(0, 1, 2)))
        # So the next attempt has another name.
        shutil.rmtree(parties.folder_of("p0") / "alignment")
    assert len(shown - {b""}) == 3


def test_a_guess_costs_what_scrypt_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(digest._SCRYPT, "n", 1 << 15)
    digest._compute_scrypt.cache_clear()
    listed = b"".join(
        len(each.encode()).to_bytes(4, "little") + each.encode() for each in ("a", "ü")
    )
    given = {"salt": b"salt", "n": 1 << 15, "r": 8, "maxmem": 1 << 26, "dklen": 32}
    slow = hashlib.scrypt(hashlib.sha256(listed).digest(), p=4, **given)  # type: ignore[arg-type]
    assert digest.compute_slow_digest(b"salt", ("a", "ü"), digest.PASSES_FOUND) == slow
    assert digest.compute_rows_digest("run", ("a", "ü"), b"salt") != digest.compute_rows_digest(
        "other", ("a", "ü"), b"salt"
    )


# -- too many rows, too few


@pytest.mark.parametrize(("who", "most"), [("p0", 41), ("p1", 41), ("p2", 39)])
def test_a_party_with_more_rows_than_wanted_is_refused_before_anything_is_masked(
    who: str, most: int, tmp_path: Path
) -> None:
    record = Recorder()
    sets = sets_of(*(many(5 * number, 40 + number) for number in range(3)))
    found, errors = Parties(
        tmp_path, sets, asks={who: {"peer_rows_at_most": most}}, tap=record
    ).outcomes()
    assert not found
    error = errors[0]
    assert isinstance(error, PeerError)
    assert (error.code, error.party) == (Code.REFUSED, "p2" if who != "p2" else "p0")
    assert_names(str(error), "peer_rows_at_most", "p2")
    assert who not in {each.sender for each in record.said if "points" in each.tensors}
    assert not [*(tmp_path / "run" / who).rglob("*.points")]


def test_few_ids_are_tried_out_on_a_small_table(tmp_path: Path) -> None:
    """By default: a list of millions of telephone numbers is refused before anything is masked."""
    most = partial(quota.limit_peer_rows, None)
    assert [most(own) for own in (1, 10_000, 50_000, 10**6, 10**9)] == [
        100_000,
        100_000,
        500_000,
        10**7,
        10**7,
    ]
    assert (quota.limit_peer_rows(7, 10**6), most(None)) == (7, 10**7)
    asks = {"p0": {"peer_rows_at_most": most(40)}}
    error = disturbed(tmp_path, 2, "p1", "p0", HELLO, "rows", ints(5_000_000), asks=asks)
    assert (error.code, error.party) == (Code.REFUSED, "p1")
    assert_names(str(error), "peer_rows_at_most", "p1")


def test_rows_of_ones_own_are_as_many_as_one_likes(tmp_path: Path) -> None:
    sets = sets_of(many(0, 40), many(5, 20))
    parties = Parties(tmp_path, sets, asks={"p0": {"peer_rows_at_most": 20}})
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(sets)}
    # The rows are known, and nobody masks any.
    parties.asks = {"p0": {"peer_rows_at_most": 1}}
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(sets)}


def test_the_server_refuses_a_party_with_more_rows_than_it_compares(tmp_path: Path) -> None:
    record = Recorder()
    parties = Parties(tmp_path, sets_of(many(0, 40), many(5, 41)), rows_at_most=40, tap=record)
    found, errors = parties.outcomes()
    assert not found
    assert isinstance(errors[0], PeerError)
    assert (errors[0].code, errors[0].party) == (Code.REFUSED, "p1")
    assert_names(str(errors[0]), "--rows-at-most", "p1")
    assert not [each for each in record.said if "tags" in each.tensors]


@pytest.mark.parametrize("enough", [True, False])
def test_a_party_answers_for_so_many_new_rows_and_not_for_fewer(
    enough: bool, tmp_path: Path
) -> None:
    """The recipe's ``rows.at_least`` is for training."""
    record, least = Recorder(), 35 if enough else 36
    sets = sets_of(many(0, 40), many(5, 40))
    parties = Parties(
        tmp_path, sets, rows={"at_least": 39}, divides=False, asks={"p1": {"at_least": least}}
    )
    parties.tap = record
    found, errors = parties.outcomes()
    if enough:
        assert not errors
        assert {tuple(each.ids) for each in found.values()} == {in_common(sets)}
        return
    assert not found
    error = errors[0]
    assert isinstance(error, PeerError)
    assert (error.code, error.party) == (Code.ROWS_DIFFER, "p1")
    assert_names(error.public, "p1")
    assert_names(str(error), "predict.at_least", "p1")
    assert "p1" not in {each.sender for each in record.said if "digest" in each.tensors}
