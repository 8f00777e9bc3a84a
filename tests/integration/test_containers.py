"""deploy/try-compose on the engine of this machine. It builds an image of several GB, so it is
asked for by name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.errors import error_line

TRY = Path(__file__).parents[2] / "deploy" / "try-compose"


def no_engine() -> str:
    """Why it cannot be tried here; '' where it can."""
    if os.environ.get("VFL_TEST_DOCKER") != "1":
        return "set VFL_TEST_DOCKER=1 to build the image and run the federation in containers (10 minutes and more)"
    docker = shutil.which("docker")
    if docker is None:
        return "docker is not installed"
    engine = subprocess.run([docker, "info"], capture_output=True, timeout=60).returncode == 0
    return (
        ""
        if engine or os.environ.get("VFL_ENGINE")
        else "no Docker engine answers (VFL_ENGINE may start one)"
    )


def test_federation_in_containers() -> None:
    if why := no_engine():
        pytest.skip(why)
    done = subprocess.run([TRY], capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    found = re.search(r"^test accuracy +(0\.\d+), with two kills \1$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert float(found[1]) >= 0.96
    assert re.search(r"^with plug-ins +0\.[89]", done.stdout, re.MULTILINE)


def test_without_an_engine_it_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock", "VFL_ENGINE": ""}
    done = subprocess.run([TRY], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--engine" in error_line(done.stderr)
