"""Counting, and joining what all processes have counted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.errors import raises
from vfl_common.bundle import Direction, Entry, Ledger, TcpCount, load_entries, read_entries
from vfl_common.errors import Code, InputError
from vfl_common.summary import gather_bytes

PHASES = ["train", "align"]


def entry(
    peer: str, direction: Direction, count: tuple[int, int, int], phase: str = "train"
) -> Entry:
    return Entry(peer, phase, "embedding", direction, *count)


def test_messages_of_one_kind_are_one_line() -> None:
    ledger = Ledger()
    ledger.add("north", "train", "embedding", "sent", 100, 120)
    ledger.add("north", "train", "embedding", "sent", 50, 60)
    ledger.add("north", "train", "embedding", "received", 1, 2)
    ledger.add("north", "align", "embedding", "sent", 3, 4)
    ledger.add("north", "train", "ack", "sent", 0, 5)
    ledger.add("east", "train", "embedding", "sent", 6, 7)
    assert ledger.entries() == [
        Entry("east", "train", "embedding", "sent", 6, 7, 1),
        Entry("north", "align", "embedding", "sent", 3, 4, 1),
        Entry("north", "train", "ack", "sent", 0, 5, 1),
        Entry("north", "train", "embedding", "received", 1, 2, 1),
        Entry("north", "train", "embedding", "sent", 150, 180, 2),
    ]


def test_a_ledger_goes_on_where_an_earlier_process_left_it(tmp_path: Path) -> None:
    first = Ledger()
    first.add("north", "train", "embedding", "sent", 100, 120)
    first.save(tmp_path / "ledger.json", [TcpCount("north", 7, 8)])
    second = Ledger()
    second.carry(load_entries(tmp_path / "ledger.json"))
    second.add("north", "train", "embedding", "sent", 1, 2)
    assert second.entries() == [Entry("north", "train", "embedding", "sent", 101, 122, 2)]
    saved = json.loads((tmp_path / "ledger.json").read_text())
    assert saved["tcp"] == [{"peer": "north", "sent_bytes": 7, "received_bytes": 8}]
    assert load_entries(tmp_path / "missing.json") == []


LINE = {"peer": "north", "phase": "train", "kind": "embedding", "direction": "sent"}
COUNTS = {"payload_bytes": 1, "message_bytes": 2, "messages": 3}
OTHERS: list[Any] = [
    [],
    {},
    {"entries": {"a": 1}},
    {"entries": [3]},
    {"entries": [LINE]},
    {"entries": [LINE | COUNTS | {"other": 1}]},
    {"entries": [LINE | COUNTS | {"peer": 1}]},
    {"entries": [LINE | COUNTS | {"direction": "up"}]},
    {"entries": [LINE | COUNTS | {"messages": "3"}]},
    {"entries": [LINE | COUNTS | {"messages": -1}]},
    # No report could hold it.
    {"entries": [LINE | COUNTS | {"messages": 2**64}]},
]


def _dump(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\x00garbage"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.mkdir(),
        *(partial(_dump, value) for value in OTHERS),
    ],
)
def test_a_damaged_ledger_is_set_aside_and_counting_begins_anew(
    harm: Callable[[Path], object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.json"
    harm(path)
    with raises(InputError, Code.FILE_INVALID, names="ledger.json"):
        read_entries(path)
    # A report only reads.
    assert path.exists()
    assert load_entries(path) == []
    assert not path.exists()
    assert (tmp_path / "ledger.json.damaged").exists()
    (warning,) = caplog.records
    assert str(path) in warning.getMessage()
    Ledger().save(path)
    assert load_entries(path) == []
    assert len(caplog.records) == 1


def test_a_damaged_ledger_that_cannot_be_renamed_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").mkdir()
    (tmp_path / "ledger.json.damaged").write_text("an earlier one")
    with raises(InputError, Code.FILE_INVALID, names="ledger.json"):
        load_entries(tmp_path / "ledger.json")


def test_threads_lose_nothing() -> None:
    ledger = Ledger()

    def count() -> None:
        for _ in range(2_000):
            ledger.add("north", "train", "embedding", "sent", 1, 2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.entries() == [Entry("north", "train", "embedding", "sent", 8_000, 16_000, 8_000)]


def test_both_ends_of_a_link_are_one_link() -> None:
    ledgers = {
        "active": [
            entry("north", "received", (100, 110, 2)),
            entry("north", "sent", (50, 55, 1), "align"),
        ],
        "north": [
            entry("active", "sent", (100, 110, 2)),
            entry("active", "received", (50, 55, 1), "align"),
        ],
    }
    found = gather_bytes(
        ledgers, {"north": [TcpCount("active", 1, 2)]}, server="server", phases=PHASES
    )
    assert found.agrees
    assert [(link.sender, link.receiver, link.phase) for link in found.by_link] == [
        # In the order of the recipe's phases.
        ("north", "active", "train"),
        ("active", "north", "align"),
    ]
    assert list(found.by_phase) == PHASES
    assert (found.total.payload_bytes, found.total.message_bytes, found.total.messages) == (
        150,
        165,
        3,
    )
    assert found.by_phase["align"].payload_bytes == 50
    assert found.by_phase["train"].message_bytes == 110
    assert [(count.party, count.peer, count.sent_bytes) for count in found.tcp] == [
        ("north", "active", 1)
    ]


def test_ends_that_disagree_are_named() -> None:
    ledgers = {
        "active": [entry("north", "received", (100, 110, 2))],
        "north": [
            entry("active", "sent", (90, 99, 1)),
            entry("active", "sent", (1, 1, 1), "align"),
        ],
    }
    found = gather_bytes(ledgers, {}, server="server", phases=PHASES)
    assert not found.agrees
    assert found.disagreements == [
        "north -> active, train, embedding",
        "north -> active, align, embedding",
    ]
    # The sender's count.
    assert found.total.payload_bytes == 91


def test_a_count_of_one_end_alone_is_kept() -> None:
    found = gather_bytes(
        {"active": [entry("north", "received", (100, 110, 2))]}, {}, server="server", phases=PHASES
    )
    assert found.total.payload_bytes == 100
    assert not found.agrees


def test_the_servers_sessions_go_on_while_reports_are_made() -> None:
    ledgers = {"server": [entry("north", "received", (0, 10, 2), "control")], "north": []}
    found = gather_bytes(ledgers, {}, server="server", phases=PHASES)
    assert found.agrees
    assert found.total.message_bytes == 10


def test_nothing_was_sent() -> None:
    found = gather_bytes({}, {}, server="server", phases=PHASES)
    assert found.agrees
    assert (found.total.messages, found.by_link, found.by_phase) == (0, [], {})
