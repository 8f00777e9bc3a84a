"""A peer that lies about records harms no record but its own, and honest ones accuse nobody."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.errors import raises
from tests.harness.pki import company, dns, written
from tests.unit.party.record.test_record import RUN, confer, recorder, send
from vfl.certs.authority import create_authority, issue
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.identity.signing import encode_chain
from vfl_common.rpc.ask import LogHeads
from vfl_party.record.heads import OWN
from vfl_party.record.history import RecordHistory, sum_disclosures
from vfl_party.record.note import RecordHead, SignedNote
from vfl_party.record.recorder import Recorder
from vfl_party.record.verify import verify

Pair = tuple[Recorder, Recorder]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return {name: load_credentials(issue(folder, name), name=name) for name in ("p0", "p1")}


@pytest.fixture
def pair(tmp_path: Path, members: dict[str, Credentials]) -> Pair:
    """The passive party p1, and the active one."""
    return recorder(tmp_path / "p1", members["p1"]), recorder(tmp_path / "p0", members["p0"])


def show(active: Recorder, shows: LogHeads) -> LogHeads:
    """One call of p1, with the messages of gRPC."""
    answer = active.heads.answer("p1", LogHeads.decode(shows.encode(), party="p1", me="p0"))
    return LogHeads.decode(answer.encode(), party="p0", me="p1")


@pytest.mark.parametrize(
    "head",
    [
        # It would be in no message, and in the way of every later one.
        RecordHead("vfl-record/p1/00", 2**63, bytes(32)),
        RecordHead("vfl-record/p1/00", 1, bytes(31)),
        RecordHead("vfl-record/p1/00", 1, bytes(4096)),
        RecordHead("vfl-record/p1/00", 1, bytes(32), 10**400),
    ],
    ids=["size", "short root", "long root", "time"],
)
def test_a_head_that_cannot_be_is_refused(
    head: RecordHead, pair: Pair, members: dict[str, Credentials]
) -> None:
    note = str(SignedNote(head).sign(members["p1"]))
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        show(pair[1], LogHeads(note=note, certificates=encode_chain(members["p1"])))
    assert pair[1].heads.read_last("p1") is None


def test_what_a_peer_puts_beside_its_signature_is_not_kept(
    pair: Pair, members: dict[str, Credentials]
) -> None:
    """Else the party's own record would look wrong."""
    one, other = pair

    def ask(shows: LogHeads) -> LogHeads:
        found = show(other, shows)
        if not found.cosigned:
            return found
        note = SignedNote.read(found.cosigned)
        more = (("eve", b"1234", b"nothing"), ("p1", b"1234", b"nothing"))
        return replace(found, cosigned=str(SignedNote(note.head, (*more, *note.signatures))))

    one.heads.confer("p0", ask)
    found = verify(one.book.folder, members["p1"])
    assert (found.wrong, set(found.signers)) == ((), {"p0", "p1"})


def test_a_peer_that_never_signs_is_named(pair: Pair) -> None:
    one, other = pair
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p0", "p1")):
        one.heads.confer("p0", lambda shows: replace(show(other, shows), cosigned=""))
    assert not one.heads.met
    assert not (one.book.folder / OWN).exists()


def test_programs_that_meet_at_once_accuse_nobody(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """Two runs of the same parties, which have a record each: one pair meets between the two calls
    of the other.
    """
    ones, others = (
        [recorder(tmp_path / name, members[name], f"{RUN}{number}") for number in range(2)]
        for name in ("p1", "p0")
    )
    confer(ones[0], others[0])
    calls = 0

    def ask(shows: LogHeads) -> LogHeads:
        nonlocal calls
        calls += 1
        if calls == 2:
            send(ones[1], 0, [1])
            confer(ones[1], others[1])
        return show(others[0], shows)

    send(ones[0], 0, [0])
    ones[0].heads.confer("p0", ask)
    assert calls == 4
    for passive, active in zip(ones, others, strict=True):
        confer(passive, active)
    assert not [*tmp_path.rglob("*.broken-*")]
    for name in ("p0", "p1"):
        assert not verify(tmp_path / name, members[name]).wrong


def test_a_peer_below_an_intermediate_has_signed(tmp_path: Path) -> None:
    root = company(tmp_path / "ca")
    below = root.intermediate()
    members = {}
    for name, of, *chain in (("p0", root), ("p1", below, below)):
        tls = written(tmp_path / "ca", name, of.leaf(dns(name)), *chain)
        members[name] = load_credentials(tls, name=name)
    one, other = (recorder(tmp_path / name, members[name]) for name in ("p1", "p0"))
    confer(one, other)
    for each in (one, other):
        found = verify(each.book.folder, members[each.book.name])
        assert (found.wrong, set(found.signers)) == ((), {"p0", "p1"})


@pytest.mark.parametrize("about", ["2:////", "2:AAA", "9:AAAA", "2:/38=", 5, [1]], ids=[*"abcdef"])
def test_rows_that_there_are_not_are_one_sentence(about: object, pair: Pair) -> None:
    one, _ = pair
    one.people(["ann", "bob"], "aligned")
    send(one, 0, [0])
    *lines, last = one.book.path.read_text().splitlines()
    changed = json.dumps(json.loads(last) | {"rows": about})
    one.book.path.write_text("\n".join([*lines, changed, ""]))
    history = RecordHistory(one.book.folder)
    for look in (
        lambda: [each.fields for each in sum_disclosures(history.disclosures()).values()],
        lambda: [each.fields for each in history.disclosures()],
        lambda: [*history.about(["ann"], history.disclosures())],
    ):
        with raises(InputError, Code.FILE_INVALID):
            look()
