"""Nobody can make evidence against a party whose record is in order, and an old head is no evidence."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.harness.errors import raises
from tests.unit.party.record.test_lies import Pair, show
from tests.unit.party.record.test_record import confer, recorder, send
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.identity.signing import encode_chain, sign
from vfl_common.rpc.ask import LogHeads
from vfl_party.record import book as book_of
from vfl_party.record.book import LINES, SECRET
from vfl_party.record.heads import PEERS, HeadRelay, accept
from vfl_party.record.note import (
    MAX_FILES,
    Proof,
    RecordHead,
    SignedNote,
    StoredHead,
    cosigner_id,
    keep_evidence,
    key_id,
    proof_text,
    verify_evidence,
)
from vfl_party.record.verify import verify

Members = Mapping[str, Credentials]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return {name: load_credentials(issue(folder, name), name=name) for name in ("p0", "p1", "p2")}


@pytest.fixture
def pair(tmp_path: Path, members: Members) -> Pair:
    """The passive party p1, and the active one."""
    return recorder(tmp_path / "p1", members["p1"]), recorder(tmp_path / "p0", members["p0"])


def head(size: int, root: int, at: int, origin: str = "vfl-record/p1/00") -> RecordHead:
    return RecordHead(origin, size, bytes([root]) * 32, at)


def held(of: RecordHead, mine: Credentials) -> StoredHead:
    return StoredHead(SignedNote(of).sign(mine), {mine.name: encode_chain(mine).decode()})


def bare(of: RecordHead, mine: Credentials) -> SignedNote:
    """What a version before cosignatures signs."""
    own = mine.name, key_id(mine.name, mine.certificate), sign(mine, of.text.encode())
    return SignedNote(of, (own,))


def file_of(tmp_path: Path, one: StoredHead, other: StoredHead, proof: Proof) -> Path:
    folder = tmp_path / PEERS
    folder.mkdir(exist_ok=True)
    return keep_evidence(folder, "p1", one, other, proof)[0]


def without_cosignature(shows: LogHeads, mine: Credentials) -> LogHeads:
    note = SignedNote.read(shows.note)
    return replace(shows, note=str(bare(note.head, mine)), proof_signature=b"")


# -- the signing oracle


@pytest.mark.parametrize("liar", ["p0", "p1"])
def test_no_party_signs_a_head_of_its_own_record_that_a_peer_shows(
    liar: str, pair: Pair, members: Members
) -> None:
    one, other = pair
    victim = other if liar == "p1" else one
    forged = head(1, 0xAB, 17, victim.book.origin)
    shows = LogHeads(
        note=str(SignedNote(forged).sign(members[liar])), certificates=encode_chain(members[liar])
    )
    with raises(PeerError, Code.IDENTITY_MISMATCH, names=("p0", "p1")):
        if liar == "p1":
            other.heads.answer("p1", shows)
        else:
            one.heads.confer("p0", lambda _: shows)
    assert victim.heads.read_last(liar) is None


def test_a_cosignature_is_never_the_signature_of_an_owner(pair: Pair, members: Members) -> None:
    """It is over other bytes, and has another identifier."""
    one, other = pair
    signed: list[SignedNote] = []

    def ask(shows: LogHeads) -> LogHeads:
        signed.extend([SignedNote.read(shows.cosigned)] if shows.cosigned else [])
        return show(other, shows)

    one.heads.confer("p0", ask)
    (note,) = signed
    name, mine = "p1", members["p1"].certificate
    by_p1 = [each for each in note.signatures if each[0] == name]
    assert [key for _, key, _ in by_p1] == [cosigner_id(name, mine)]
    as_owner = SignedNote(note.head, ((name, key_id(name, mine), by_p1[0][2]),))
    assert not as_owner.is_signed_by(name, mine)
    bare_ = SignedNote(note.head, ((name, key_id(name, mine), by_p1[0][2][8:]),))
    assert not bare_.is_signed_by(name, mine)


def test_a_party_of_an_older_version_is_met_and_its_record_verifies(
    tmp_path: Path, pair: Pair, members: Members
) -> None:
    """It reads and writes signatures over heads alone."""
    one, other = pair

    def ask(shows: LogHeads) -> LogHeads:
        if shows.note:
            return without_cosignature(show(other, shows), members["p0"])
        note = SignedNote.read(shows.cosigned)
        ids = {key for signer, key, _ in note.signatures if signer == "p1"}
        assert key_id("p1", members["p1"].certificate) in ids
        answer = show(other, shows)
        mine = SignedNote.read(answer.cosigned).head
        return replace(answer, cosigned=str(bare(mine, members["p0"])))

    one.heads.confer("p0", ask)
    send(one, 0, [0])
    one.heads.confer("p0", ask)
    for each in pair:
        found = verify(each.book.folder, members[each.book.name])
        assert (found.wrong, set(found.signers)) == ((), {"p0", "p1"})


# -- evidence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (head(8, 1, 20), head(8, 2, 21)),
        (head(8, 1, 20), head(8, 2, 20)),
        (head(8, 1, 20), head(7, 2, 21)),
    ],
    ids=["same size", "same size and time", "smaller and later"],
)
def test_heads_that_contradict_each_other_are_evidence(
    old: RecordHead, new: RecordHead, tmp_path: Path, members: Members
) -> None:
    mine = members["p1"]
    for one, other in itertools.permutations([held(old, mine), held(new, mine)]):
        path = file_of(tmp_path, one, other, Proof())
        assert path.name.startswith("p1.broken-")
        assert verify_evidence(path, "p1", members["p0"]).startswith("p1 has signed ")


def test_a_proof_convicts_if_the_accused_has_signed_it(tmp_path: Path, members: Members) -> None:
    old, new = head(3, 1, 20), head(8, 2, 21)
    one, other = (held(each, members["p1"]) for each in (old, new))
    hashes = (bytes(32),)
    good = sign(members["p1"], proof_text(3, new, hashes))
    path = file_of(tmp_path, one, other, Proof(hashes, good))
    assert "a proof from one to the other that does not hold" in verify_evidence(
        path, "p1", members["p0"]
    )
    path.unlink()
    by_another = sign(members["p0"], proof_text(3, new, hashes))
    of_another = sign(members["p1"], proof_text(2, new, hashes))
    for signature in (b"", b"x", by_another, of_another):
        path = file_of(tmp_path, one, other, Proof(hashes, signature))
        assert path.name.startswith("p1.not-shown-")
        with raises(InputError, Code.FILE_INVALID, names="p1.not"):
            verify_evidence(path, "p1", members["p0"])


@pytest.mark.parametrize("spoilt", [(), (bytes(32),)], ids=["no proof", "a spoilt proof"])
def test_consistent_heads_of_an_honest_party_convict_nobody(
    spoilt: tuple[bytes, ...], pair: Pair, tmp_path: Path, members: Members
) -> None:
    """A proof can be lost, late, or spoilt by the accuser."""
    one, other = pair
    confer(one, other)
    send(one, 0, [0])
    before = other.heads.read_last("p1")
    assert before is not None

    def ask(shows: LogHeads) -> LogHeads:
        # The proof for p0 is in the second call.
        return show(other, replace(shows, proof=spoilt) if shows.cosigned else shows)

    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1.not", "p0")):
        one.heads.confer("p0", ask)
    (path,) = (other.book.folder / PEERS).glob("p1.*.json")
    assert path.name.startswith("p1.not-shown-")
    with raises(InputError, Code.FILE_INVALID, names=("p1.not", "p0")):
        verify_evidence(path, "p1", members["p0"])


def test_what_is_no_contradiction_is_not_shown(tmp_path: Path, members: Members) -> None:
    mine, old = members["p1"], head(8, 1, 20)
    ours = held(old, mine)
    by_an_older_version = StoredHead(bare(head(8, 2, 21), mine), ours.certificates)
    another = held(head(8, 2, 21, "vfl-record/p1/01"), mine)
    of_p0 = held(head(8, 2, 21, "vfl-record/p0/00"), mine)
    cosigned_by_p0 = StoredHead(
        SignedNote(head(8, 2, 21)).sign(members["p0"]), held(old, members["p0"]).certificates
    )
    for each in (by_an_older_version, another, of_p0, cosigned_by_p0, ours):
        path = file_of(tmp_path, ours, each, Proof())
        assert path.name.startswith("p1.not-shown-")
        with raises(InputError, Code.FILE_INVALID, names="p1.not"):
            verify_evidence(path, "p1", members["p0"])
        path.unlink()


def test_a_clock_that_is_set_back_makes_no_evidence(
    tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = recorder(tmp_path / "1", members["p1"])
    heads: list[RecordHead] = []
    for at in (1_700_000_100.0, 1_700_000_000.0, 1_700_000_050.0):
        monkeypatch.setattr(book_of, "now", lambda at=at: at)
        send(one, len(heads), [0])
        heads.append(one.book.head())
    assert [each.at for each in heads] == [1_700_000_100] * 3
    sizes = [each.size for each in heads]
    assert sizes == sorted(set(sizes))


def test_files_of_heads_are_bounded(tmp_path: Path, members: Members) -> None:
    mine, old = members["p1"], head(8, 0, 20)
    (tmp_path / PEERS).mkdir()
    for kind, size in (("not-shown", 9), ("broken", 8)):
        for root in range(1, MAX_FILES + 4):
            keep_evidence(
                tmp_path / PEERS, "p1", held(old, mine), held(head(size, root, 20), mine), Proof()
            )
        assert len([*(tmp_path / PEERS).glob(f"p1.{kind}-*.json")]) == MAX_FILES


def test_a_second_record_of_a_peer_is_reported(
    tmp_path: Path, pair: Pair, members: Members
) -> None:
    """A peer that has lost its folder begins another, which a person accepts by hand."""
    one, other = pair
    confer(one, other)
    again = recorder(tmp_path / "again", members["p1"])
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1.not", "p0")):
        confer(again, other)
    (path,) = (other.book.folder / PEERS).glob("p1.not-shown-*.json")
    with raises(InputError, Code.FILE_INVALID, names=("p1.not", "p0")):
        verify_evidence(path, "p1", members["p0"])
    accept(other.book.folder, "p1")
    confer(again, other)
    found = verify(other.book.folder, members["p0"])
    assert (found.wrong, found.records) == ((), {"p1": [one.book.origin, again.book.origin]})


# -- one record for each peer


class Three:
    """An active party, and passive parties that it shows a record each."""

    def __init__(self, folder: Path, members: Members) -> None:
        self.views = {name: recorder(folder / f"p0-{name}", members["p0"]) for name in PASSIVES}
        self.ends = {name: recorder(folder / name, members[name]) for name in PASSIVES}
        self.relays = {
            name: HeadRelay(self.ends[name].heads, name, "p0", partial(members.__getitem__, name))
            for name in PASSIVES
        }

    def join(self) -> None:
        """The server passes on what all show, as JSON."""
        shown = {name: each.shows() for name, each in self.relays.items()}
        shown = json.loads(json.dumps({**shown, "p0": None}))
        for each in self.relays.values():
            each.meet("run", shown)

    def meet(self, name: str) -> None:
        view = self.views[name]

        def ask(shows: LogHeads) -> LogHeads:
            call = LogHeads.decode(shows.encode(), party=name, me="p0")
            answer = view.heads.answer(name, call)
            return LogHeads.decode(answer.encode(), party="p0", me=name)

        self.ends[name].heads.confer("p0", ask)

    def sends(self, step: int) -> None:
        """What goes to one passive party is in the record for this party alone."""
        for name in PASSIVES:
            for _ in range(1 + (name == PASSIVES[0])):
                send(self.views[name], step, [0], to=name)


PASSIVES = ("p1", "p2")


@pytest.mark.parametrize("same_name", [False, True])
def test_an_active_party_that_keeps_a_record_for_each_peer_is_caught(
    same_name: bool, tmp_path: Path, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another name of the record for each peer, it is refused; with one name, the heads are
    evidence.
    """
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(book_of, "now", lambda: float(next(seconds)))
    three = Three(tmp_path, members)
    if same_name:
        first, other = (three.views[name].book.path for name in PASSIVES)
        three.views["p2"].book.close()
        for name in (LINES, SECRET):
            (other.parent / name).write_bytes((first.parent / name).read_bytes())
        three.views["p2"] = recorder(other.parent, members["p0"])
    three.join()
    for name in PASSIVES:
        three.sends(0)
        three.meet(name)
    three.sends(1)
    three.join()
    for name in PASSIVES:
        with raises(PeerError, Code.MALFORMED_MESSAGE):
            three.meet(name)
        (path,) = (three.ends[name].book.folder / PEERS).glob("p0.*.json")
        if same_name:
            assert verify_evidence(path, "p0", members["p1"]).startswith("p0 has signed ")
        else:
            with raises(InputError, Code.FILE_INVALID):
                verify_evidence(path, "p0", members["p1"])


def test_no_proof_for_another_passive_party_is_refused(tmp_path: Path, members: Members) -> None:
    """Also if it is left out, or the active party claims an older version by then."""
    three = Three(tmp_path, members)
    three.views["p2"] = three.views["p1"]
    for name in PASSIVES:
        three.meet(name)
    send(three.views["p1"], 0, [0], to="p1")
    three.join()
    view = three.views["p2"]

    def ask(shows: LogHeads) -> LogHeads:
        return replace(view.heads.answer("p2", shows), proofs=())

    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p0.not", "p1")):
        three.ends["p2"].heads.confer("p0", ask)
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p0.not", "p1")):
        three.ends["p2"].heads.confer(
            "p0", lambda shows: without_cosignature(ask(shows), members["p0"])
        )
    three.meet("p2")


def test_one_record_goes_on_for_all(tmp_path: Path, members: Members) -> None:
    """An honest active party has a proof from each head that it has shown to anybody."""
    three = Three(tmp_path, members)
    three.views["p2"].book.close()
    three.views["p2"] = three.views["p1"]
    for step in range(3):
        three.join()
        for name in PASSIVES:
            three.meet(name)
            three.sends(step)
    assert not [*tmp_path.rglob("p0.*.json")]


def test_a_record_that_a_person_has_accepted_is_not_asked_for_the_old_one(
    tmp_path: Path, members: Members
) -> None:
    three = Three(tmp_path, members)
    three.views["p2"] = three.views["p1"]
    for name in PASSIVES:
        three.meet(name)
    again = recorder(tmp_path / "again", members["p0"])
    three.views = dict.fromkeys(PASSIVES, again)
    accept(three.ends["p1"].book.folder, "p0")
    three.join()
    three.meet("p1")
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p0.not", "p2")):
        three.meet("p2")
    accept(three.ends["p2"].book.folder, "p0")
    three.join()
    three.meet("p2")


@pytest.mark.parametrize(
    "invented",
    ["text", {"note": 1}, "unsigned", "of another", "older", {"certificates": {"p0": 1}}],
    ids=str,
)
def test_a_head_that_the_active_party_has_not_signed_counts_as_none(
    invented: object, tmp_path: Path, members: Members
) -> None:
    three = Three(tmp_path, members)
    of = {"unsigned": ("p1", "vfl-record/p0/00"), "of another": ("p0", "vfl-record/p1/00")}
    if isinstance(invented, str) and invented in of:
        signer, origin = of[invented]
        invented = json.loads(held(head(9, 1, 20, origin), members[signer]).line)
    own = head(9, 1, 20, "vfl-record/p0/00")
    if invented == "older":
        invented = json.loads(StoredHead(bare(own, members["p0"]), {"p0": ""}).line)
    elif invented == {"certificates": {"p0": 1}}:
        invented = json.loads(held(own, members["p0"]).line) | {"certificates": {"p0": 1}}
    three.relays["p2"].meet("run", {"p1": invented, "p2": None, "p0": None})
    assert three.ends["p2"].heads.relayed == {}
    three.meet("p2")
