"""A party whose disk is full ends with one sentence, and the others learn why."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import error_line
from tests.harness.federation import Federation, refused
from tests.harness.served import Served, trained
from tests.harness.waiting import wait_until
from vfl_party.serve.run import LOG

MANY = {"ids": [f"K-{number}" for number in range(100)]}
MOUNT, UMOUNT = shutil.which("mount"), shutil.which("umount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """128 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or MOUNT is None or UMOUNT is None:
        pytest.skip("only root mounts a small disk")
    mount = [MOUNT, "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=30)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run([UMOUNT, str(folder)], check=True, timeout=30)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leaves no byte of a file system while the block runs."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        path.unlink()


def lines_of(served: Served, name: str, *events: str) -> list[dict[str, Any]]:
    """The lines of a party's log with these events."""
    text = (served.federation.folder / "runs" / LOG.format(name)).read_text()
    return [line for line in map(json.loads, text.splitlines()) if line.get("event") in events]


def test_serving_says_that_its_disk_is_full_and_goes_on_once_it_is_not(
    small_disk: Path, tmp_path: Path
) -> None:
    """The record of the active party first, then that of a passive party has no room."""
    with trained(tmp_path, {"kind": "splitnn", "epochs": 1, "batch_size": 24}) as served:
        for name in ("p0", "p1"):
            served.federation.extra[name] = {"record": {"folder": str(small_disk)}}
        served.start_all()
        assert served.ask("/v2/health/ready")[0] == 200
        served.rows("K-1")
        with filled(small_disk):
            # The last block of the record still has some room.
            wait_until(lambda: served.ask("/v1/predict", MANY)[0] == 503)
            for _ in range(5):
                status, answer = served.ask("/v1/predict", MANY)
                assert status == 503
                assert os.strerror(errno.ENOSPC) in answer["error"]
                assert "/" not in answer["error"]
            assert served.ask("/v2/health/ready") == (503, {"ready": False, "live": True})
        # Somebody who waits for readiness asks for nothing else.
        assert served.ask("/v2/health/ready")[0] == 200
        (row,) = served.rows("K-1")
        assert row["state"] == "scored"
        full = lines_of(served, "p0", "unwritable", "written")
        assert [line["event"] for line in full] == ["unwritable", "written"]
        assert [line["level"] for line in full] == ["error", "warning"]


def test_a_passive_party_with_a_full_disk_is_named_in_rows_and_in_one_line(
    small_disk: Path, tmp_path: Path
) -> None:
    with trained(tmp_path, {"kind": "splitnn", "epochs": 1, "batch_size": 24}) as served:
        served.federation.extra["p1"] = {"record": {"folder": str(small_disk)}}
        served.start_all()
        served.rows("K-1")
        with filled(small_disk):
            wait_until(lambda: served.rows(*MANY["ids"])[0]["missing"] == {"p1": "failed"})
            for _ in range(5):
                row, *_ = served.rows(*MANY["ids"])
                assert row["missing"] == {"p1": "failed"}
        (row,) = served.rows("K-1")
        assert row["missing"] == {}
        for name, event in (("p0", "unanswered"), ("p1", "unwritable"), ("p1", "untold")):
            assert len(lines_of(served, name, event)) == 1, event


def test_a_full_disk_is_one_sentence(small_disk: Path, tmp_path: Path) -> None:
    tables = cases.recipe(
        2, model={"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [1000]}}
    )
    with Federation(tmp_path / "run", tables, cases.digits(2, limit=60)) as federation:
        federation.extra = {"p1": {"out": str(small_disk)}}
        server = federation.start_server()
        federation.start_party("p0")
        line = refused(federation.start_party("p1"), os.strerror(errno.ENOSPC))
        assert line.startswith(f"error: {small_disk}/")
        assert server.wait(60) == 2
        line = error_line(server.stderr)
        assert "p1" in line
        assert os.strerror(errno.ENOSPC) in line
        assert str(small_disk) not in server.stderr
