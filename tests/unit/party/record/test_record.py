"""A record finds every change, survives kills, and knows what left about whom."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.harness.errors import raises
from tests.harness.waiting import wait_until
from vfl.certs.authority import create_authority, issue
from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.frames import measure_bundle
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.rpc.ask import LogHeads
from vfl_party.record import book as book_of
from vfl_party.record.book import LINES, RecordBook
from vfl_party.record.heads import OWN, HeadExchange
from vfl_party.record.history import RecordHistory
from vfl_party.record.lines import (
    ALL,
    NOBODY,
    PEOPLE_FOLDER,
    SMALL_BYTES,
    TOGETHER,
    digest_of,
    find_rows,
    pack_rows,
    tag_person,
    unpack_rows,
    write_people,
)
from vfl_party.record.note import RecordHead, SignedNote, verify_evidence
from vfl_party.record.recorder import RecordedRun, Recorder
from vfl_party.record.verify import copy, require, verify

# ``VFL_RECORD_CHANGES=10000`` tries that many.
CHANGES = int(os.environ.get("VFL_RECORD_CHANGES", "200"))
KILLS = int(os.environ.get("VFL_RECORD_KILLS", "8"))
RUN = "20260101-000000-case-0000"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Credentials]:
    """Two parties of one CA."""
    folder = tmp_path_factory.mktemp("ca")
    create_authority(folder, "test")
    return {name: load_credentials(issue(folder, name), name=name) for name in ("p0", "p1")}


def recorder(folder: Path, mine: Credentials, run: str = RUN, **more: object) -> Recorder:
    book = RecordBook(folder, mine.name)
    return Recorder(
        book,
        HeadExchange(book, lambda: mine),
        RecordedRun(run, 1, "train", "0" * 64),
        keys={},
        **more,  # type: ignore[arg-type]
    )


def bundle(numbers: int, fill: float = 0.5) -> Bundle:
    data = memoryview(bytearray(np.full(numbers, fill, np.float32).tobytes()))
    return Bundle(Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, (numbers,), data)})


def send(of: Recorder, step: int, rows: object, width: int = 2, to: str = "p0") -> None:
    count = len(rows) if isinstance(rows, list) else 1
    of.leaves(
        ("embedding", "up", "embedding z", "identity", ""),
        StepKey("splitnn", 0, step),
        bundle(count * width),
        (to,),
        numbers=count * width,
        rows=rows,  # type: ignore[arg-type]
    )


def confer(passive: Recorder, active: Recorder) -> None:
    """What the two do over gRPC, with the same messages."""

    def ask(shows: LogHeads) -> LogHeads:
        answer = active.heads.answer("p1", LogHeads.decode(shows.encode(), party="p1", me="p0"))
        return LogHeads.decode(answer.encode(), party="p0", me="p1")

    passive.heads.confer("p0", ask)


# -- lines


@pytest.mark.parametrize(
    "rows", [[], [0], [7], [5, 6, 7, 8], [3, 1, 2], [0, 300], [9, 9], [0, 70_000], [1 << 30, 4]]
)
def test_rows_are_read_as_they_were_written(rows: list[int]) -> None:
    text = pack_rows(np.array(rows, np.int64))
    assert text is not None
    assert unpack_rows(text).tolist() == sorted(rows)


def test_words_in_place_of_rows_stay() -> None:
    assert [pack_rows(each) for each in (None, ALL, NOBODY, TOGETHER)] == [None, "*", "", "+"]


def test_a_digest_tells_bundles_apart_and_says_if_it_is_of_a_sample() -> None:
    small, large, step, key = bundle(100), bundle(5000), StepKey("splitnn", 3, 4), bytes(32)
    assert digest_of(small, step, key).startswith("keyed:")
    assert digest_of(large, step, key).startswith("keyed-sample:")
    assert digest_of(large, step, key, whole=True).startswith("keyed:")
    for whole in (False, True):
        found = {digest_of(bundle(5000, n / 8), step, key, whole=whole) for n in range(8)}
        assert len(found) == 8
    assert digest_of(large, step, key) == digest_of(bundle(5000), step, key)


def test_nobody_without_the_key_compares_a_guess_with_a_digest(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """A score of three digits has a thousand values; the record outlives the data."""
    one = recorder(tmp_path, members["p1"])
    send(one, 0, [0], width=1)
    (told,) = (each.digest for each in RecordHistory(tmp_path).disclosures())
    kind, _, digest = told.partition(":")
    step, guess = StepKey("splitnn", 0, 0), bundle(1)
    name, tensor = next(iter(guess.tensors.items()))
    form = f"{name} {tensor.dtype.name} {tensor.shape} ".encode()
    assert kind == "keyed"
    assert sha256(form + bytes(tensor.data)).hexdigest() != digest
    assert digest_of(guess, step, bytes(32)) != told
    assert digest_of(guess, step, one.book.secret) == told


# -- notes


def test_lines_of_one_way_have_the_digest_and_sizes_of_their_own_bundle(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """Whatever form the bundle before had."""
    chance, one = random.Random(5), recorder(tmp_path, members["p1"])  # noqa: S311 - of a test
    sent = []
    for number in range(60):
        tensors = {}
        for name in chance.sample("abc", chance.choice([0, 1, 1, 2, 3])):
            size = chance.choice([0, 4, 5000])
            dtype, width = chance.choice([(DType.UINT8, 1), (DType.FLOAT16, 2)])
            data = memoryview(chance.randbytes(size * width))
            tensors[name] = Buffer(dtype, (size,), data)
        step, bundle = StepKey("splitnn", 0, number * number), Bundle(Kind.WEIGHTS, tensors)
        one.leaves(("w", "up", "w", "c", "", ""), step, bundle, ["p0"], numbers=0, rows=None)
        key = sha256(b"vfl digest of a bundle" + one.book.secret).digest().ljust(64, b"\0")
        expected, size_ = sha256(key), measure_bundle(step, bundle)
        sampled = False
        for name, each in tensors.items():
            expected.update(f"{name} {each.dtype.name} {each.shape} ".encode())
            first, sampled_ = 0, each.data.nbytes > SMALL_BYTES
            if sampled_:
                first = number * number * 104_729 % (each.data.nbytes - 1023)
            expected.update(each.data[first : first + (1024 if sampled_ else SMALL_BYTES)])
            sampled |= sampled_
        word = "keyed-sample" if sampled else "keyed"
        sizes = size_.payload_bytes, size_.message_bytes, size_.messages
        sent.append((f"{word}:{expected.hexdigest()}", *sizes))
    one.book.close()
    found = RecordHistory(one.book.folder).disclosures()
    said = [(each.digest, each.payload_bytes, each.message_bytes, each.messages) for each in found]
    assert said == sent


def test_a_note_is_read_as_it_was_written(members: dict[str, Credentials]) -> None:
    note = SignedNote(RecordHead("vfl-record/p1/00", 3, bytes(32), 17)).sign(members["p1"])
    both = note.sign(members["p0"])
    assert SignedNote.read(str(both)) == both
    assert str(both).startswith("vfl-record/p1/00\n3\n" + "A" * 43 + "=\nat 17\n\n\N{EM DASH} p1 ")
    for name, mine in members.items():
        assert both.is_signed_by(name, mine.certificate)
        assert not both.is_signed_by(name, members["p1" if name == "p0" else "p0"].certificate)
    for other in (
        replace(note.head, size=4),
        replace(note.head, root=b"1" * 32),
        replace(note.head, at=18),
    ):
        assert not SignedNote(other, both.signatures).is_signed_by("p1", members["p1"].certificate)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\n1\nAA==\nat 1\n",
        "a\nx\nAA==\nat 1\n\n",
        "a\n1\nAA==\n\n",
        "a b\n1\nAA==\nat 1\n\n",
        "é\n1",
    ],
)
def test_what_is_no_note_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SignedNote.read(text)


# -- changes


def test_every_change_of_what_was_signed_is_found(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    one, other = recorder(tmp_path / "1", members["p1"]), recorder(tmp_path / "0", members["p0"])
    for step in range(12):
        send(one, step, [step, step + 1])
        if step % 4 == 3:
            confer(one, other)
    one.heads.seal()
    one.book.close()
    path = one.book.path
    lines, chance = path.read_bytes().splitlines(keepends=True), random.Random(7)  # noqa: S311 - of a test
    assert not verify(one.book.folder, members["p1"]).wrong

    def altered(found: list[bytes]) -> None:
        at = chance.randrange(len(found))
        place = chance.randrange(len(found[at]) - 1)
        was = found[at][place]
        found[at] = (
            found[at][:place] + bytes([was ^ chance.randrange(1, 256)]) + found[at][place + 1 :]
        )

    def dropped(found: list[bytes]) -> None:
        del found[chance.randrange(len(found))]

    def moved(found: list[bytes]) -> None:
        one, other = chance.sample(range(len(found)), 2)
        found[one], found[other] = found[other], found[one]

    def cut(found: list[bytes]) -> None:
        del found[chance.randrange(len(found)) :]

    def added(found: list[bytes]) -> None:
        found.insert(chance.randrange(len(found)), chance.choice(found))

    changes: list[Callable[[list[bytes]], None]] = [altered, dropped, moved, cut, added]
    for number in range(CHANGES):
        found = [*lines]
        changes[number % len(changes)](found)
        # A line that is added at the end changes nothing that was signed.
        if found[: len(lines)] == lines:
            continue
        path.write_bytes(b"".join(found))
        assert verify(one.book.folder, members["p1"]).wrong, (number, changes[number % 5].__name__)


def test_a_copy_for_an_auditor_verifies_and_finds_nobody(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    one, other = recorder(tmp_path / "1", members["p1"]), recorder(tmp_path / "0", members["p0"])
    one.people(["ann", "bob"], "aligned")
    send(one, 0, [0])
    confer(one, other)
    folder, out = one.book.folder, tmp_path / "copy"
    copy(folder, out)
    found = verify(out, members["p0"], "p1")
    assert (found.wrong, set(found.signers)) == ((), {"p0", "p1"})
    assert verify(out, members["p0"]).wrong
    secrets = [one.book.secret, tag_person(one.book.secret, "ann")]
    assert any(secrets[0] in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for path in out.rglob("*"):
        assert not any(each in path.read_bytes() for each in secrets), path
    with raises(InputError, Code.FILE_INVALID):
        copy(folder, out)
    lines = out / LINES
    lines.write_text(lines.read_text().replace('"numbers":2', '"numbers":3'))
    assert verify(out, members["p0"], "p1").wrong


@pytest.mark.parametrize("kept", [0, 1])
def test_heads_that_are_missing_are_said(
    kept: int, tmp_path: Path, members: dict[str, Credentials]
) -> None:
    one, other = recorder(tmp_path / "1", members["p1"]), recorder(tmp_path / "0", members["p0"])
    for step in range(2):
        send(one, step, [step])
        confer(one, other)
    for each, name in ((one, "p1"), (other, "p0")):
        each.book.close()
        path = each.book.folder / OWN
        assert not verify(each.book.folder, members[name]).wrong
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
        with raises(InputError, Code.FILE_INVALID, names="heads.jsonl"):
            require(each.book.folder, members[name])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_record_that_is_written_anew_is_found_by_the_peer(
    steps: int, tmp_path: Path, members: dict[str, Credentials], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer, as many and more lines: whichever, the two heads are evidence."""
    seconds = itertools.count(1_700_000_000)
    monkeypatch.setattr(book_of, "now", lambda: float(next(seconds)))
    one, other = recorder(tmp_path / "1", members["p1"]), recorder(tmp_path / "0", members["p0"])
    for step in range(5):
        send(one, step, [step])
    confer(one, other)
    one.book.close()
    # The same record, with the same name and other lines, and all heads made anew.
    first = one.book.path.read_bytes().splitlines(keepends=True)[0]
    for each in ("hashes", "hashes.json", OWN):
        (one.book.folder / each).unlink()
    one.book.path.write_bytes(first)
    again = recorder(tmp_path / "1", members["p1"])
    for step in range(steps):
        send(again, step, [step + 1])
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1.broken"):
        confer(again, other)
    (path,) = (other.book.folder / "peers").glob("p1.*.json")
    assert verify_evidence(path, "p1", members["p0"]).startswith("p1 has signed ")


def test_whatever_is_written_anew_the_peer_finds(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """Lines at random are of other rows, and the tree and all heads are made anew."""
    chance = random.Random(11)  # noqa: S311 - of a test
    for number in range(CHANGES // 50):
        folder = tmp_path / str(number)
        one, other = recorder(folder / "1", members["p1"]), recorder(folder / "0", members["p0"])
        for step in range(5):
            send(one, step, [step])
        confer(one, other)
        one.book.close()
        lines = one.book.path.read_bytes().splitlines(keepends=True)
        sent = [at for at, line in enumerate(lines) if b'"sent"' in line]
        for at in chance.sample(sent, chance.randint(1, len(sent))):
            lines[at] = lines[at].replace(b'"numbers":2', b'"numbers":%d' % chance.randint(3, 99))
        for each in ("hashes", "hashes.json", OWN):
            (one.book.folder / each).unlink()
        one.book.path.write_bytes(b"".join(lines))
        again = recorder(folder / "1", members["p1"])
        with pytest.raises(PeerError) as error:
            confer(again, other)
        assert error.value.code is Code.MALFORMED_MESSAGE, number
        again.book.close()
        other.book.close()


def test_nothing_leaves_to_a_peer_that_has_not_shown_its_record(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    one = recorder(tmp_path / "1", members["p1"], asks_for=["p0"])
    other = recorder(tmp_path / "0", members["p0"])
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p0"):
        send(one, 0, [0])
    confer(one, other)
    send(one, 0, [0])
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        other.heads.answer("p1", LogHeads())


# -- the file


def test_a_line_without_end_is_cut_off(tmp_path: Path) -> None:
    book = RecordBook(tmp_path, "p1")
    book.add(number=1)
    head = book.head()
    with book.path.open("ab") as file:
        file.write(b'{"number":2,')
    other = RecordBook(tmp_path, "p1")
    other.add(number=3)
    assert other.head().size == head.size + 1
    lines = [json.loads(line) for line in book.path.read_text().splitlines()]
    assert [line.get("number") for line in lines] == [None, 1, 3]


def test_programs_of_one_party_share_a_record(tmp_path: Path) -> None:
    books = [RecordBook(tmp_path, "p1") for _ in range(3)]
    heads = []
    for number in range(30):
        books[number % 3].add(number=number)
        heads.append((books[(number + 1) % 3], books[(number + 1) % 3].head()))
    assert [head.size for _, head in heads] == [*range(2, 32)]
    (tmp_path / "hashes.json").unlink()
    assert books[0].head().root == heads[-1][1].root


def test_a_disk_that_fails_is_heard_of_before_more_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fails(_file: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(book_of, "_SYNC_S", 0.01)
    book = RecordBook(tmp_path, "p0")
    monkeypatch.setattr(os, "fdatasync", fails)
    book.add(kind="embedding")
    assert failed.wait(20.0)
    wait_until(lambda: book._failed)
    with raises(InputError, Code.FILE_INVALID, names="lines.jsonl"):
        book.add(kind="embedding")
    book.close()


def test_another_partys_record_is_refused(tmp_path: Path) -> None:
    RecordBook(tmp_path, "p1").close()
    with raises(InputError, Code.FILE_INVALID, names=("lines.jsonl", "p1")):
        RecordBook(tmp_path, "p2")


def test_kills_tear_no_line_and_lose_nothing_that_has_left(tmp_path: Path) -> None:
    args = [sys.executable, "-m", "tests.harness.record_kills", str(tmp_path), str(KILLS)]
    found = subprocess.run(args, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["kills"] == KILLS


# -- people


def test_what_left_about_a_person_in_five_runs_is_what_was_sent(
    tmp_path: Path, members: dict[str, Credentials]
) -> None:
    """Each run has rows of its own, in an order of its own; the ids themselves are in no file."""
    chance, sent = np.random.default_rng(3), Counter[tuple[str, str]]()
    everybody = [f"person-{number}" for number in range(40)]
    for number in range(5):
        run = f"{RUN}{number}"
        of = recorder(tmp_path, members["p1"], run)
        ids = [everybody[at] for at in chance.permutation(40)[:25]]
        of.people(sorted(everybody), "table")
        of.leaves(
            ("rows", "up", "rows", "identity", ""),
            StepKey("open", 0, 0),
            bundle(1),
            ("p0",),
            numbers=1,
            rows=None,
        )
        of.people(ids, "aligned")
        for step in range(12):
            rows = chance.permutation(25)[: int(chance.integers(1, 9))].tolist()
            send(of, step, rows)
            sent.update((run, ids[row]) for row in rows)
        send(of, 12, ALL)
        sent.update((run, each) for each in ids)
        send(of, 13, TOGETHER)
        of.book.close()
    history = RecordHistory(tmp_path)
    found = Counter(
        (each.way.run, person)
        for person in everybody
        for each in history.about([person], history.disclosures())
    )
    assert found == sent
    assert [*history.about(["nobody"], history.disclosures())] == []
    history.check_known(run=f"{RUN}4", peer="p0", phase="open", kind=None)
    for name in ("run", "peer", "phase", "kind"):
        with raises(InputError, Code.CONFIG_INVALID):
            history.check_known(**{"peer": "p0", name: "other"})
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"person-" not in path.read_bytes(), path


KILLED_AT_TAGS = """
import os, sys
from pathlib import Path
from vfl_party.record.lines import PEOPLE_FOLDER, find_rows, tag_person, write_people
def ids():
    yield "a"
    os._exit(9)
write_people(Path(sys.argv[1]), b"secret", ids())
"""


def test_tags_that_a_killed_program_has_begun_to_write_are_removed(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_TAGS, str(tmp_path)], check=False, timeout=60
    )
    assert killed.returncode == 9
    assert len([*(tmp_path / PEOPLE_FOLDER).iterdir()]) == 1
    for ids in (["a", "b"], ["a", "b"], ["c"]):
        digest, count = write_people(tmp_path, b"secret", ids)
        assert count == len(ids)
        assert find_rows(tmp_path, digest, tag_person(b"secret", ids[0])).tolist() == [0]
    assert len([*(tmp_path / PEOPLE_FOLDER).iterdir()]) == 2


def test_tags_that_were_damaged_are_mended_by_the_next_run(tmp_path: Path) -> None:
    digest, _ = write_people(tmp_path, b"secret", ["a", "b"])
    (tmp_path / PEOPLE_FOLDER / digest).write_bytes(b"damaged")
    with raises(InputError, Code.FILE_INVALID):
        find_rows(tmp_path, digest, tag_person(b"secret", "b"))
    assert write_people(tmp_path, b"secret", ["a", "b"]) == (digest, 2)
    assert find_rows(tmp_path, digest, tag_person(b"secret", "b")).tolist() == [1]


@pytest.mark.parametrize(
    "line", ['{"sent":' + "[" * 100_000, '{"people":"\\ud800","rows":1,"run":"r","generation":1}']
)
def test_a_line_that_no_program_of_ours_writes_is_named(line: str, tmp_path: Path) -> None:
    RecordBook(tmp_path, "p1").close()
    with (tmp_path / LINES).open("a") as file:
        file.write(f"{line}\n")
    with raises(InputError, Code.FILE_INVALID, names="lines.jsonl") as caught:
        list(RecordHistory(tmp_path).disclosures())
    assert "line 2" in str(caught.value)


def test_a_line_that_is_none_is_named(tmp_path: Path, members: dict[str, Credentials]) -> None:
    of = recorder(tmp_path, members["p1"])
    of.book.add_line('{"sent":"unknown"}')
    with raises(InputError, Code.FILE_INVALID, names="lines.jsonl"):
        [*RecordHistory(tmp_path).disclosures()]
