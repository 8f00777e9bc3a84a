"""A record that cannot be written: who serves says so once, and goes on once there is room."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.common.test_full_disk import little_room
from vfl_common.errors import Code, InputError, UnwritableError
from vfl_common.rpc.serving.stream import OutgoingMessage
from vfl_party.record.book import RecordBook
from vfl_serve.opening import Disk

TOLD = OutgoingMessage("shop", "serve", "question", 1, 0, ["K-1"], None, 0, b"", 0, 9)


def test_a_full_disk_is_said_once_and_found_to_have_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    book, said = RecordBook(tmp_path, "bank"), list[str]()
    disk = Disk(tmp_path, said.append)
    write = disk.note_failures(lambda _told: book.add(text="x" * 500))
    try:
        write(TOLD)
        assert disk.ready()
        with little_room():
            for _ in range(9):
                with suppress(UnwritableError):
                    write(TOLD)
            with pytest.raises(UnwritableError):
                write(TOLD)
            assert not disk.ready()
            # A short line finds room, and the next one may not.
            disk.note_failures(lambda _told: None)(TOLD)
            assert not disk.ready()
        assert len(said) == 1
        assert disk.ready()
        assert [each.__dict__["event"] for each in caplog.records] == ["unwritable", "written"]
        assert len(said) == 2
    finally:
        book.close()


def test_what_a_policy_refuses_is_no_full_disk(tmp_path: Path) -> None:
    def refuses(_told: OutgoingMessage) -> None:
        raise InputError(Code.REFUSED, "too many rows")

    disk = Disk(tmp_path, lambda _said: None)
    with pytest.raises(InputError):
        disk.note_failures(refuses)(TOLD)
    assert disk.ready()
