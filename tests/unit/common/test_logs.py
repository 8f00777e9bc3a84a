"""Log lines: JSON, with the same keys in each, whatever a line is about."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.contract.exchanges import keyring
from vfl_common.bundle import Ledger
from vfl_common.errors import Code, VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.process import logs
from vfl_common.process.logs import (
    Console,
    EarlyLog,
    buffer_early_lines,
    log_to,
    log_to_stdout,
    utc,
)
from vfl_common.process.program import run_for_status
from vfl_common.rpc.counters import TcpMeter
from vfl_server.control.membership import Member
from vfl_server.control.service import ControlService


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    root, level = logging.getLogger(), logging.getLogger().level
    handler = log_to(tmp_path / "log.jsonl", run="r1", party="server")
    yield tmp_path / "log.jsonl"
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_and_says_who_writes_it(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console("vfl-server", json_lines=True)
    console.emit("joined", party="bank", role="active", name="x", time="now", level=3)
    console.emit("progress", phase="splitnn", round=1, rounds=2)
    # Progress is not for the log.
    (line,) = lines(log)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "version": version("vfl"),
        "run": "r1",
        "party": "server",
        "message": "joined",
        "event": "joined",
        "party_": "bank",
        "role": "active",
        "name_": "x",
        "time_": "now",
        "level_": 3,
    }
    told = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in told] == ["joined", "progress"]
    assert told[0]["party"] == "bank"


@pytest.mark.parametrize(
    ("event", "level"), [("lost", "warning"), ("interrupted", "warning"), ("left", "info")]
)
def test_an_event_that_should_be_looked_at_is_a_warning(log: Path, event: str, level: str) -> None:
    Console("vfl-server", json_lines=True).emit(event, party="bank")
    (line,) = lines(log)
    assert (line["event"], line["level"]) == (event, level)


def test_lines_stay_lines(log: Path) -> None:
    logging.getLogger("x").warning("a\nb %s", "\u2028", extra={"path": Path("p"), "event": "note"})
    (line,) = lines(log)
    assert (line["message"], line["path"], line["event"]) == ("a\nb \u2028", "p", "note")


def test_a_peer_s_words_move_no_cursor_and_fill_no_log(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console("vfl-server", json_lines=False)
    console.emit("joined", party="bank", device="cpu\x1b[2J\nerror: forged")
    console.emit("waiting", missing=["a\x9bb"], left_s=1.0)
    console.emit(
        "progress", phase="splitnn", round=1, rounds=2, metrics={"loss\x1b]0;": float("nan")}
    )
    console.emit("note", note="x" * 100_000)
    out = capsys.readouterr().out
    assert [line[:40] for line in out.splitlines()] == [
        "joined  party bank  device cpu [2J error: forged"[:40],
        "waiting for a b (1 s left)",
        "splitnn  round 1/2  loss ]0; nan",
        "note  note " + "x" * 29,
    ]
    assert all(line.isprintable() for line in out.splitlines())
    assert max(map(len, log.read_text().splitlines())) < 3_000


def test_what_happens_to_a_run_is_a_sentence(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console("vfl-party", json_lines=False)
    console.show("interrupted", reason="bank was stopped")
    console.show("interrupted", reason="bank was lost", deadline_s=900.0)
    console.show("left_out", source="a.csv", why="1 of 3 rows are left out: 1 without an id")
    console.show("resumed", checkpoint="000002.splitnn.2")
    console.show("refused", party="bank", code="RECIPE_DIFFERS", why="another seed")
    console.show("refused", party="", code="IDENTITY_MISMATCH", why="no name")
    console.show("predicted", written=1, rows=2, said="1 of 2 rows are predicted", output="a.csv")
    console.show("predicted", written=1, rows=2, said="1 of 2 rows are predicted")
    console.show("scores", said="score_1: the probability that left is 1")
    assert capsys.readouterr().out.splitlines() == [
        "interrupted: bank was stopped",
        "interrupted: bank was lost; the others wait at most 900 s",
        "a.csv: 1 of 3 rows are left out: 1 without an id",
        "resuming from checkpoint 000002.splitnn.2",
        "refused bank: another seed",
        "refused a caller without a name: no name",
        "a.csv: 1 of 2 rows are predicted",
        "1 of 2 rows are predicted",
        "score_1: the probability that left is 1",
    ]
    # Whoever shows it has logged it.
    assert lines(log) == []


def test_the_first_lines_wait_for_the_file(tmp_path: Path) -> None:
    root, level = logging.getLogger(), logging.getLogger().level
    buffer_early_lines()
    for number in range(1100):
        logging.getLogger("x").info("%d", number)
    handler = log_to(tmp_path / "log.jsonl", run="r1", party="bank")
    logging.getLogger("x").info("1100")
    assert not [each for each in root.handlers if isinstance(each, EarlyLog)]
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()
    first, *found = lines(tmp_path / "log.jsonl")
    assert (first["event"], first["version"], first["run"]) == ("program", version("vfl"), "r1")
    assert [int(line["message"]) for line in found] == list(range(100, 1101))
    assert {(line["run"], line["party"]) for line in found} == {("r1", "bank")}


def test_the_lines_of_the_log_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are those of the file, and of what happens before there is one; no event is beside
    them.
    """
    root, level = logging.getLogger(), logging.getLogger().level
    before = list(root.handlers)
    log_to_stdout()
    console = Console("vfl-server", json_lines=True)
    logging.getLogger("x").warning("early", extra={"event": "guessed"})
    handler = log_to(tmp_path / "log.jsonl", run="r1", party="bank")
    console.emit("joined", party="hospital")
    console.emit("progress", phase="splitnn", round=1, rounds=2)
    console.show("scores", said="score_1")
    failed = VflError(Code.PARTY_LOST, "hospital was lost")
    assert run_for_status(raising(failed)) == 3
    for each in [each for each in root.handlers if each not in before]:
        root.removeHandler(each)
    root.setLevel(level)
    handler.close()
    first, *rest = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {key: first[key] for key in ("level", "version", "event")} == {
        "level": "warning",
        "version": version("vfl"),
        "event": "guessed",
    }
    assert "party" not in first
    assert rest == lines(tmp_path / "log.jsonl")
    assert [(line["event"], line["level"], line["party"], line["run"]) for line in rest] == [
        ("joined", "info", "bank", "r1"),
        ("failed", "error", "bank", "r1"),
    ]
    assert rest[1]["code"] == "PARTY_LOST"


def raising(error: Exception) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


def test_a_reader_of_the_lines_that_is_gone_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        log_to_stdout()
        logging.getLogger("x").warning("said to nobody")
        for each in [each for each in root.handlers if each not in before]:
            root.removeHandler(each)
        with contextlib.suppress(OSError):
            stream.close()
    assert capsys.readouterr().err == ""


def test_a_file_of_events_does_not_grow_with_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the one that `vfl simulate` gives each party; a pipe or a terminal gets the progress
    too.
    """
    reader, writer = os.pipe()
    with (
        (tmp_path / "stdout").open("w+") as file,
        os.fdopen(writer, "w") as pipe,
        os.fdopen(reader) as read,
    ):
        for stream in (file, pipe):
            monkeypatch.setattr("sys.stdout", stream)
            console = Console("vfl-party", json_lines=True)
            console.emit("progress", phase="splitnn", round=1)
            console.emit("completed")
        pipe.close()
        assert [json.loads(each)["event"] for each in read] == ["progress", "completed"]
        file.seek(0)
        assert [json.loads(each)["event"] for each in file] == ["completed"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A log whose files hold 1,000 bytes: about eight lines."""
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 1_000)
    root, level = logging.getLogger(), logging.getLogger().level
    yield tmp_path / "log.jsonl"
    root.setLevel(level)
    for handler in [each for each in root.handlers if isinstance(each, logging.FileHandler)]:
        root.removeHandler(handler)
        handler.close()


def test_a_log_has_an_end_and_keeps_the_newest_lines(small: Path) -> None:
    log_to(small, run="r1", party="server")
    for number in range(200):
        # Another generation opens it again.
        if number == 150:
            log_to(small, run="r1", party="server")
        logging.getLogger("x").info("%d", number)
    files = [small.with_name(f"log.jsonl.{number}") for number in range(5, 0, -1)] + [small]
    assert sorted(files) == sorted(small.parent.iterdir())
    assert all(file.stat().st_size <= 1_000 for file in files)
    kept = [int(line["message"]) for file in files for line in lines(file)]
    assert len(kept) > 30
    assert kept == list(range(200))[-len(kept) :]


def test_a_log_that_cannot_be_renamed_goes_on_in_the_same_file(small: Path) -> None:
    # The fifth, a folder, cannot be removed.
    for number in (4, 5):
        small.with_name(f"log.jsonl.{number}").mkdir()
    log_to(small, run="r1", party="server")
    for number in range(50):
        logging.getLogger("x").info("%d", number)
    assert [int(line["message"]) for line in lines(small)] == list(range(50))


def test_lines_and_events_are_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Console("vfl-server", json_lines=True).emit(
        "note", metrics={"loss": float("nan"), "auc": [float("inf")]}
    )
    for text in (log.read_text(), capsys.readouterr().out):
        found = json.loads(text, parse_constant=pytest.fail)
        assert found["metrics"] == {"loss": None, "auc": [None]}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (1_767_323_045.678, "2026-01-02T03:04:05.678Z")],
)
def test_time_is_utc(seconds: float, text: str) -> None:
    assert utc(seconds) == text


def test_a_defect_while_a_party_is_heard_stands_in_the_log_and_refuses_it(log: Path) -> None:
    class Broken:
        def handle(self, _member: Member, _message: control_pb2.PartyMessage) -> None:
            raise TypeError("a defect")

    service = ControlService(Broken(), keyring("server"), Ledger(), TcpMeter())  # type: ignore[arg-type]
    member = Member("bank")
    heartbeat = control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat()).SerializeToString()
    service._read(member, iter([heartbeat, heartbeat]))
    told = member.outbox.get_nowait()
    assert told is not None
    assert told.stop.code == Code.INTERNAL
    assert "a defect" not in told.stop.message
    assert member.outbox.get_nowait() is None
    (line,) = lines(log)
    assert (line["event"], line["level"]) == ("failed", "error")
    assert "TypeError: a defect" in line["exception"]


class _Hesitant:
    """A stream in which other threads get their turn between any two writes."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        time.sleep(0.001)
        return len(text)

    def flush(self) -> None:
        pass


def test_events_of_several_threads_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program waits for the line ``ready``, which the main thread writes while parties already
    join in others.
    """
    stream, console = _Hesitant(), Console("vfl-server", json_lines=True)
    monkeypatch.setattr(sys, "stdout", stream)

    def report() -> None:
        for number in range(20):
            console.show("joined", number=number)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(json.loads(line)["number"] for line in stream.text.splitlines()) == sorted(
        [*range(20)] * 4
    )
