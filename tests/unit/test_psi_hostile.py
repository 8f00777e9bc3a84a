"""Private alignment with a party that breaks the protocol: the first error is one sentence that names it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.exchanges import credentials
from tests.harness.aligning import SERVER, Parties, Recorder, changed, in_common, sets_of, small_batches
from vfl_common.bundle import Bundle, StepKey
from vfl_common.errors import Code, InputError, InterruptedRun, PeerError, VflError
from vfl_common.psi import MOST_ROWS, PHASE, TAG_BYTES
from vfl_party.align import psi
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
    folder: Path, parties: int, sender: str, receiver: str, step: StepKey, name: str, change: Change, **given: Any
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
    assert len(errors) == parties + 1  # the server's is one
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
    "off the curve": (lambda data: number(off_the_curve()) + data[32:], "a point that is not on the curve"),
    "zero": (lambda data: number(0) + data[32:], "a point that is zero or of small order"),
    "small order": (lambda data: data[:-32] + number(1), "a point that is zero or of small order"),
    "not canonical": (lambda data: number(P + 9) + data[32:], "a point that is no canonical number"),
    "top bit": (lambda data: data[:31] + bytes([data[31] | 128]) + data[32:], "a point that is no canonical number"),
    "twice": (lambda data: data[32:64] + data[32:], "a point twice"),
}


@pytest.mark.parametrize("kind", POINTS)
@pytest.mark.parametrize(("liar", "peer"), [("p0", "p1"), ("p1", "p0")])
def test_points_that_cannot_be(liar: str, peer: str, kind: str, tmp_path: Path) -> None:
    change, text = POINTS[kind]
    error = disturbed(tmp_path, 2, liar, peer, FIRST, "points", change)
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, liar)
    assert str(error).startswith(f"{liar} sent {text}")


@pytest.mark.parametrize("change", [lambda data: data + data[:32], lambda data: data[32:], lambda data: data[1:]])
@pytest.mark.parametrize(("liar", "peer"), [("p0", "p1"), ("p1", "p0")])
def test_other_sizes_than_announced(liar: str, peer: str, change: Change, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, liar, peer, FIRST, "points", change)
    assert error.code in (Code.TENSOR_MISMATCH, Code.TENSOR_TOO_LARGE)
    assert error.party == liar
    assert str(error).startswith(f"{liar} at phase align, round 1, batch 0: ")


def test_the_same_points_in_two_batches(tmp_path: Path) -> None:
    """Only the server sees it: within a batch there is none twice."""
    shown: list[bytes] = []

    def tap(who: str, to: str, at: StepKey, bundle: Bundle) -> Bundle:
        if (who, to) != ("p1", "p0") or at not in (FIRST, SECOND):
            return bundle
        shown.append(bytes(bundle.tensors["points"].data))
        return changed(bundle, "points", shown[0])

    _, errors = Parties(tmp_path, sets_of(many(0, 40), many(5, 40)), tap=tap).outcomes()
    assert isinstance(errors[0], PeerError)
    assert errors[0].party == "p1"
    assert str(errors[0]) == "the masked rows of p1 hold a row twice"
    assert len(errors) == 3


@pytest.mark.parametrize("change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: bytes(len(data))])
def test_what_is_changed_on_its_way_does_not_open(change: Change, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 3, "p0", "p2", FIRST, "points", change)
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p1")
    assert str(error).startswith("what p1 has sealed does not open")


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
    assert str(errors[0]).startswith("p1 sent a point that is not on the curve")
    assert len(errors) == 4


# -- how the parties meet ----------------------------------------------------------------------------------------------


def ints(*values: int) -> Change:
    return lambda _data: np.array(values, "<i8").tobytes()


@pytest.mark.parametrize("rows", [0, -1, -(2**63), MOST_ROWS + 1, 10**12, 2**63 - 1])
def test_a_passive_party_announces_rows_that_cannot_be(rows: int, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 3, "p2", "p0", HELLO, "rows", ints(rows))
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p2")
    assert str(error) == f"p2 says that it has {rows} rows; 1 to {MOST_ROWS} can be aligned"


def test_a_passive_party_announces_masked_rows_that_cannot_be(tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p1", "p0", HELLO, "masked", ints(0, -1))
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p1")
    assert str(error) == "p1 says that it keeps -1 masked rows, which cannot be"


@pytest.mark.parametrize("rows", [(41, 41), (0, 41), (-1, 41), (10**12, 41), (40, 40), (2**63 - 1, 41)])
def test_the_active_party_announces_other_rows(rows: tuple[int, int], tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "rows", ints(*rows))
    assert error.party == "p0"
    if rows != (41, 41):  # which may be, so it shows later
        assert str(error) == f"p0 says that the parties have {list(rows)} rows, which cannot be"


@pytest.mark.parametrize("first", [-1, 1, 3, 99, -(2**63)])
def test_the_active_party_would_leave_out_batches(first: int, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "first", ints(first, 0))
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p0")
    assert str(error) == "p0 would leave out batches that p1 lacks"


def test_the_active_party_says_that_the_rows_are_known(tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "known", lambda _data: b"\1")
    assert (error.code, error.party) == (Code.MALFORMED_MESSAGE, "p0")
    assert str(error) == "p0 says that all parties know the common rows, and this party does not"


@pytest.mark.parametrize("name", [bytes(16), b"another attempt!"])
def test_the_active_party_names_another_attempt_to_one(name: bytes, tmp_path: Path) -> None:
    """Its rows are hashed with another salt, so none is common."""
    error = disturbed(tmp_path, 2, "p0", "p1", HELLO, "attempt", lambda _data: name)
    assert error.code in (Code.ROWS_DIFFER, Code.MALFORMED_MESSAGE)


# -- introductions -----------------------------------------------------------------------------------------------------


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
    "for another run": (introduction("p1", "run2"), Code.IDENTITY_MISMATCH, "the introduction of p1 is not signed for"),
    "garbage": (lambda data: bytes(range(256)) * (len(data) // 256), Code.MALFORMED_MESSAGE, "the introduction of p1"),
    "nothing": (lambda data: bytes(len(data)), Code.MALFORMED_MESSAGE, "the introduction of p1 cannot be read"),
}


@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_an_introduction_that_is_not_the_partys(kind: str, tmp_path: Path) -> None:
    change, code, text = INTRODUCTIONS[kind]
    error = disturbed(tmp_path, 3, "p1", "p0", HELLO, "introduction", change, credentials=credentials)
    assert (error.code, error.party) == (code, "p1")
    assert str(error).startswith(text)


def test_a_certificate_that_is_too_long_is_told_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed.KeyPair, "introduction", lambda *_: bytes(psi.INTRODUCTION_BYTES - 1))
    found, errors = Parties(tmp_path, sets_of(many(0, 20), many(5, 20)), credentials=credentials).outcomes()
    assert not found
    assert isinstance(errors[0], InputError)
    assert "its introduction has 4095 bytes, and 4094 may be sent; take one with fewer names" in str(errors[0])


def test_introductions_in_order_are_accepted(tmp_path: Path) -> None:
    found = Parties(tmp_path, sets_of(many(0, 20), many(5, 20), many(9, 20)), credentials=credentials).align()
    assert {tuple(each.ids) for each in found.values()} == {tuple(sorted(many(9, 11)))}


def test_the_active_party_introduces_a_key_of_its_own_for_another(tmp_path: Path) -> None:
    """Otherwise it could read what p1 seals for p2."""
    forged = introduction("p0")(bytes(psi.INTRODUCTION_BYTES))

    def change(data: bytes) -> bytes:
        size = psi.INTRODUCTION_BYTES
        return data[: 2 * size] + forged + data[3 * size :]

    error = disturbed(tmp_path, 3, "p0", "p1", HELLO, "introductions", change, credentials=credentials)
    assert (error.code, error.party) == (Code.IDENTITY_MISMATCH, "p2")
    assert str(error) == "the introduction of p2 has a certificate for 'p0'"


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((41, 41), "p1 has 41 masked rows of p0, which has 40"),
        ((42, 40), "p0 has 41 masked rows of p1, which has 42"),
        ((0, 40), f"p1 says that it has 0 rows; 1 to {MOST_ROWS} can be aligned"),
        ((-1, 40), f"p1 says that it has -1 rows; 1 to {MOST_ROWS} can be aligned"),
        ((10**12, 40), f"p1 says that it has {10**12} rows; 1 to {MOST_ROWS} can be aligned"),
    ],
)
def test_the_server_is_told_sizes_that_do_not_fit(sizes: tuple[int, int], text: str, tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p1", SERVER, StepKey(PHASE, 2, 0), "sizes", ints(*sizes))
    assert (error.code, str(error)) == (Code.MALFORMED_MESSAGE, text)
    assert error.party in text


def test_the_server_is_sent_a_tag_twice(tmp_path: Path) -> None:
    tags = StepKey(PHASE, 2, 1)
    error = disturbed(tmp_path, 2, "p1", SERVER, tags, "tags", lambda data: data[:TAG_BYTES] + data[:-TAG_BYTES])
    assert str(error) == "the masked rows of p0 hold a row twice"


def test_the_server_is_sent_fewer_tags(tmp_path: Path) -> None:
    error = disturbed(tmp_path, 2, "p1", SERVER, StepKey(PHASE, 2, 1), "tags", lambda data: data[TAG_BYTES:])
    assert (error.code, error.party) == (Code.TENSOR_MISMATCH, "p1")
    assert re.match("p1 at phase align, round 2, batch 1: tensor 'tags' is", str(error))


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
    assert "the parties do not take the same rows from the alignment" in str(errors[0])
    assert not [*tmp_path.rglob("alignment/*")]
    parties.tap = lambda _who, _to, _at, bundle: bundle
    assert {tuple(each.ids) for each in parties.align().values()} == {in_common(sets)}


# -- who makes up the list of another ----------------------------------------------------------------------------------


def test_an_active_party_that_turns_tags_sees_nothing_of_the_list_that_it_makes(tmp_path: Path) -> None:
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
            bundle = changed(bundle, "common", bytes([128]) + bytes(bundle.tensors["common"].data.nbytes - 1))
        return record(who, to, at, bundle)

    sets = sets_of(many(0, 40), many(5, 40))
    found, errors = Parties(tmp_path, sets, rows={"at_least": 20}, tap=tap).outcomes()
    assert not found
    assert "fewer rows are held by all parties than rows.at_least = 20" in str(errors[0])
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
        "goes on with an alignment in which the parties had other numbers of rows" in str(each) for each in errors
    )
    assert not state.exists()
