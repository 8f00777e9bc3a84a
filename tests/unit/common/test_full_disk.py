"""Where there is no room for a file, one sentence says which, and what to do; what was there before
stays whole.
"""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.harness.errors import assert_names, raises
from vfl_common.bundle import Ledger, load_entries
from vfl_common.errors import Code, InputError, UnwritableError
from vfl_common.files import append, await_room, write_atomic
from vfl_common.process.logs import log_to, open_separate_log
from vfl_party.base.checkpoint import CheckpointStore

# Bytes of one file.
REGISTRY = 2000


@contextmanager
def little_room() -> Iterator[None]:
    """Files of this process end after so many bytes: EFBIG, which is handled as a full disk is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (REGISTRY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def ledger(lines: int) -> Ledger:
    made = Ledger()
    for number in range(lines):
        made.add(f"p{number}", "train", "embedding", "sent", 1, 2)
    return made


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("summary.json", lambda path, size: write_atomic(path, "x" * size)),
        ("metrics.jsonl", lambda path, size: append(path, "x" * size)),
        ("ledger.json", lambda path, size: ledger(size // 100).save(path)),
        (
            "checkpoints",
            lambda path, size: CheckpointStore(path, 2).save(
                "000001.a.1", {"x": torch.ones(size // 4)}
            ),
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_sentence_names_the_file_and_what_to_do(
    name: str, write: Callable[[Path, int], None], tmp_path: Path
) -> None:
    with little_room(), pytest.raises(InputError) as raised:
        write(tmp_path / name, 100 * REGISTRY)
    text, public = str(raised.value), raised.value.public
    assert text.startswith(f"{tmp_path / name}: cannot ")
    assert_names(text, "processes")
    assert "\n" not in text
    assert_names(public, "written")
    assert str(tmp_path) not in public
    # Nothing half written is left.
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


def test_a_log_says_how_many_lines_it_misses(tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    log = open_separate_log(path, party="bank")
    try:
        log.info("before")
        size = path.stat().st_size
        with little_room():
            while path.stat().st_size < REGISTRY:
                log.info("x" * 100)
            for _ in range(200):
                log.info("lost")
        for _ in range(2):
            log.info("after")
    finally:
        for each in log.handlers:
            each.close()
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert size < REGISTRY
    (missing,) = [line for line in said if line.get("event") == "missing"]
    assert missing["level"] == "warning"
    assert missing["lines"] >= 200 - sum(line["message"] == "lost" for line in said)
    assert [line["message"] for line in said[-2:]] == ["after", "after"]


def test_a_file_in_a_folders_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "p1").write_text("")
    with raises(InputError, Code.FILE_INVALID, names=("run.json", "p1")):
        write_atomic(tmp_path / "p1" / "run.json", "x")


def test_what_was_there_stays_whole(tmp_path: Path) -> None:
    ledger(2).save(tmp_path / "ledger.json")
    store = CheckpointStore(tmp_path / "checkpoints", 2)
    store.save("000001.a.1", {"x": torch.ones(3)})
    with little_room():
        with pytest.raises(InputError):
            ledger(2000).save(tmp_path / "ledger.json")
        with pytest.raises(InputError):
            store.save("000002.a.2", {"x": torch.ones(10_000)})
    assert load_entries(tmp_path / "ledger.json") == ledger(2).entries()
    assert store.labels() == ["000001.a.1"]
    assert torch.equal(store.load("000001.a.1")["x"], torch.ones(3))


def test_a_checkpoint_that_is_written_later_has_the_same_sentence(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    store = CheckpointStore(path, 2)
    with little_room():
        store.save_later("000001.a.1", {"x": torch.ones(10_000)})
        with raises(InputError, Code.CHECKPOINT_INVALID):
            store.flush()
    assert not list(path.iterdir())


def test_a_line_of_the_log_is_lost_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = log_to(tmp_path / "log.jsonl")
    try:
        logging.getLogger("test").info("first")
        with little_room():
            logging.getLogger("test").info("x" * 100 * REGISTRY)
        logging.getLogger("test").info("last")
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["message"] == "first"
    assert capsys.readouterr().err == ""


def test_room_is_for_a_file_of_the_size_that_follows(tmp_path: Path) -> None:
    """A checkpoint that did not fit leaves its room free, so that a small file would fit."""
    said: list[str] = []
    await_room([tmp_path], 0.0, said.append)
    assert said == []
    with pytest.raises(UnwritableError):
        await_room([tmp_path], 0.0, said.append, room=1 << 62)
