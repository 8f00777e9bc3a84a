"""A party whose disk is full ends with one sentence, and the others learn why."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import cases
from tests.harness.federation import Federation, refused
from tests.harness.sentences import error_as_before

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
        line = error_as_before(server.stderr)
        assert "p1" in line
        assert os.strerror(errno.ENOSPC) in line
        assert str(small_disk) not in server.stderr
