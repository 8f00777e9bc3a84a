"""Files of a record that were damaged, lost, or are another record's, are said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.errors import raises
from vfl.certs.authority import create_authority, issue
from vfl_common import files
from vfl_common.errors import Code, InputError
from vfl_common.identity.credentials import load_credentials
from vfl_party.record.book import SECRET, RecordBook, secret_of
from vfl_party.record.heads import OWN, HeadExchange
from vfl_party.record.history import RecordHistory
from vfl_party.record.verify import verify


def test_programs_that_begin_a_record_at_once_have_one_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[RecordBook] = []
    begins = threading.Thread(target=lambda: others.append(RecordBook(tmp_path, "p1")))
    write = files.private_file

    def with_another(path: Path) -> object:
        if begins.ident is None:
            begins.start()
            # It would be ready by then, if it did not wait for this one.
            begins.join(0.2)
        return write(path)

    monkeypatch.setattr(files, "private_file", with_another)
    book = RecordBook(tmp_path, "p1")
    begins.join(20.0)
    assert book.secret == others[0].secret == (tmp_path / SECRET).read_bytes()
    for each in (book, *others):
        each.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"short"),
        lambda path: path.write_bytes(bytes(65)),
        lambda path: path.write_bytes(bytes(32)),
    ],
    ids=["lost", "cut", "too long", "another's"],
)
def test_a_key_that_is_not_the_record_s_is_refused(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    book = RecordBook(tmp_path, "p1")
    assert secret_of(tmp_path) == book.secret
    book.close()
    damage(tmp_path / SECRET)
    with raises(InputError, Code.FILE_INVALID, names="people.secret"):
        RecordBook(tmp_path, "p1")
    history = RecordHistory(tmp_path)
    with raises(InputError, Code.FILE_INVALID, names="people.secret"):
        [*history.about(["anna"], history.disclosures())]


def test_heads_that_are_no_text_are_said(tmp_path: Path) -> None:
    create_authority(tmp_path / "ca", "test")
    mine = load_credentials(issue(tmp_path / "ca", "p1"), name="p1")
    book = RecordBook(tmp_path / "record", "p1")
    HeadExchange(book, lambda: mine).seal()
    book.close()
    assert not verify(book.folder, mine).wrong
    path = book.folder / OWN
    path.write_bytes(b"\xff" + path.read_bytes())
    with raises(InputError, Code.FILE_INVALID, names="heads.jsonl"):
        verify(book.folder, mine)
