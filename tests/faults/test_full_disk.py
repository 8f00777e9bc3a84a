"""A party whose disk is full says so in one sentence; the others wait for it, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation, Program
from tests.harness.proxy import Proxy
from tests.harness.served import Served, trained
from tests.harness.standing import Standing, make_recipe, simulate
from tests.harness.waiting import wait_until
from tests.integration.test_resume import (
    DATA,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    parameters,
    recipe,
)
from vfl_common.errors import Code, LostError, UnwritableError
from vfl_common.process.program import STOPPED
from vfl_serve.run import LOG

MANY = {"ids": [f"K-{number}" for number in range(100)]}
MOUNT, UMOUNT = shutil.which("mount"), shutil.which("umount")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 KiB."""
    with mounted(tmp_path / "disk", "128k") as folder:
        yield folder


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small file system in ``folder``, which is made."""
    folder.mkdir()
    if os.geteuid() != 0 or MOUNT is None or UMOUNT is None:
        pytest.skip("only root mounts a small disk")
    mount = [MOUNT, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False, timeout=30)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        # A disk that stays mounted stops pytest from removing its old folders.
        subprocess.run([UMOUNT, "--lazy", str(folder)], check=True, timeout=30)


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


def ends_full(program: Program, folder: Path) -> None:
    """Waits until a program ends because ``folder`` has no room, with one line."""
    assert program.wait() == UnwritableError.EXIT_CODE
    assert len(program.stderr.splitlines()) == 1, program.stderr
    line = program.stderr
    assert line.startswith(f"error: {folder}/")
    assert os.strerror(errno.ENOSPC) in line
    assert "Free some disk space" in line


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


def test_a_full_disk_is_one_sentence_and_the_others_wait(small_disk: Path, tmp_path: Path) -> None:
    tables = cases.recipe(
        2, model={"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [1000]}}
    )
    with Federation(tmp_path / "run", tables, cases.digits(2, limit=60)) as federation:
        federation.extra = {"p1": {"out": str(small_disk)}}
        server = federation.start_server()
        federation.start_party("p0")
        ends_full(federation.start_party("p1"), small_disk)
        assert server.wait_for("lost", party="p1")["how"] == "was stopped"
        for name in ("server", "p0"):
            program = federation.programs[name]
            program.signal(signal.SIGTERM)
            # A program that has ended would have another code.
            assert program.wait() == STOPPED
            assert str(small_disk) not in program.stderr + json.dumps(program.seen())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    with Federation(tmp_path_factory.mktemp("undisturbed"), recipe(), DATA) as federation:
        federation.start_all()
        federation.finish()
        return parameters(federation)


@pytest.mark.parametrize("victim", ["p0", "p1"])
@pytest.mark.parametrize("key", ["out", "record"])
def test_a_disk_that_fills_while_a_party_trains(
    key: str, victim: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    """The party ends; started again, it waits for space, and the run goes on as if undisturbed."""
    with (
        mounted(tmp_path / "disk", "2m") as disk,
        Proxy() as proxy,
        Federation(tmp_path / "run", recipe(), DATA) as federation,
    ):
        federation.extra = {
            "p2": {"active": proxy.address},
            victim: {key: str(disk) if key == "out" else {"folder": str(disk)}},
        }
        proxy.hold_at(sent=SECOND_EPOCH)
        federation.start_server()
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        for name in ("p1", "p2"):
            federation.start_party(name)
        proxy.wait_until_held()
        with filled(disk):
            proxy.release()
            ends_full(federation.programs[victim], disk)
            assert federation.programs["server"].wait_for("lost", party=victim)
            again = federation.start_party(victim)
            assert "This process waits 60 s for space" in again.wait_for("advice")["said"]
        if victim == "p0":
            proxy.target = again.wait_for("ready")["address"]
        assert federation.finish()["interruptions"] == 1
        if key == "out":
            folder = federation.run_folder / victim
            shutil.copytree(disk / federation.run_folder.name / victim, folder)
        assert_equal(parameters(federation), undisturbed)


def test_a_disk_that_fills_while_the_server_serves(tmp_path: Path, undisturbed: Parameters) -> None:
    """The server ends; started again, it waits for space, and no party has ended meanwhile."""
    with (
        mounted(tmp_path / "disk", "2m") as disk,
        Proxy() as proxy,
        Federation(tmp_path / "run", recipe(), DATA) as federation,
    ):
        federation.extra = {"p2": {"active": proxy.address}}
        federation.server_options = ("--out", str(disk))
        proxy.hold_at(sent=SECOND_EPOCH)
        federation.start_server()
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        for name in ("p1", "p2"):
            federation.start_party(name)
        proxy.wait_until_held()
        with filled(disk):
            proxy.release()
            ends_full(federation.programs["server"], disk)
            options = ("--listen", federation.address, "--out", str(disk))
            again = federation.start("server", "vfl-server", "run", "recipe.toml", *options)
            assert "for space" in again.wait_for("advice")["said"]
        for program in federation.programs.values():
            assert program.wait() == 0, program.stderr
        assert len([*disk.glob("*/summary.json")]) == 1
        assert_equal(parameters(federation), undisturbed)


@pytest.mark.parametrize("full", ["hub", "bank/node"])
def test_a_standing_federation_waits_until_a_disk_has_room_again(full: str, tmp_path: Path) -> None:
    """A run goes on during that time or afterwards, and a new proposal is not lost."""
    (tmp_path / full).parent.mkdir(exist_ok=True)
    with mounted(tmp_path / full, "16m") as disk, closing(Standing(tmp_path)) as federation:
        federation.start()
        expected = {}
        for name, epochs in (("first", 200), ("second", 3)):
            expected[name] = make_recipe(name, epochs, run={"rejoin_deadline_s": 120.0})
        first = federation.submit(expected["first"])
        federation.wait(first, lambda row: row["last"].get("event") == "progress")
        with filled(disk):
            if full == "hub":
                with raises(LostError, Code.PARTY_LOST, names="disk"):
                    federation.submit(expected["second"])
            else:
                # The hub has it, and the node cannot store it.
                second = federation.submit(expected["second"])
                federation.nodes["bank"].wait_for("disconnected")
                assert federation.row(second, at="shop")["state"] in ("", "open")
        if full == "hub":
            second = federation.submit(expected["second"])
        for name, number in (("first", first), ("second", second)):
            federation.wait_for_state(number, "done")
            metrics = simulate(expected[name]).metrics
            assert federation.read_summary(number)["metrics"] == metrics
