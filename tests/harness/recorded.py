"""Runs in this process whose parties keep records, as if what they exchange left the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from vfl.simulation import inprocess
from vfl_common.bundle import CONTROL, Entry
from vfl_common.rpc.messages import Start
from vfl_party.record.book import RecordBook, folder_of
from vfl_party.record.heads import HeadExchange
from vfl_party.record.history import RecordHistory
from vfl_party.record.recorder import RecordedRun, Recorder

# {(peer, phase, kind, what): count}.
Counted = Counter[tuple[str, str, str, str]]
_WHAT = ("payload_bytes", "message_bytes", "messages")


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """The parties of runs in this process write records below ``folder``; nobody signs them."""
    make = inprocess._Federation._connect
    books: dict[str, RecordBook] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def transport(self: Any, name: str, ledger: Any, start: Start, clock: Any) -> Any:
            found: Any = make(self, name, ledger, start, clock)
            if name not in books:
                books[name] = RecordBook(folder_of(folder, name), name)
                stack.callback(books[name].close)
            found.record = Recorder(
                books[name],
                HeadExchange(books[name], cast(Any, None)),
                RecordedRun(self._folder.name, start.generation, "train", "0" * 64),
                keys={},
            )
            return found

        patch.setattr(inprocess._Federation, "_connect", transport)
        yield


def of_record(folder: Path, name: str) -> Counted:
    """Sums of a party's record."""
    found = Counted()
    for each in RecordHistory(folder_of(folder, name)).disclosures():
        for peer in each.to:
            for what in _WHAT:
                found[peer, each.way.phase, each.way.kind, what] += getattr(each, what)
    return +found


def of_ledger(entries: list[Entry], direction: str = "sent") -> Counted:
    """Sums of a ledger, without control."""
    found = Counted()
    for entry in entries:
        if entry.direction == direction and entry.phase != CONTROL:
            for what in _WHAT:
                found[entry.peer, entry.phase, entry.kind, what] += getattr(entry, what)
    return +found
