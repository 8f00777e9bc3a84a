"""Runs ``vfl`` in the tests' own process: what it imports is there, and one launcher forks all its
federations.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

from tests.harness.federation import launcher
from tests.harness.sharing import FRESH
from vfl.cli import cli
from vfl.launcher.forks import Launcher
from vfl_common.process.program import run_for_status

LAUNCHING = (
    "vfl.simulation.run.run_launcher",
    "vfl_lab.studies.run.run_launcher",
    "vfl.launcher.forks.run_launcher",
)


@contextlib.contextmanager
def _shared(_threads: int) -> Iterator[Launcher]:
    yield launcher()


@contextlib.contextmanager
def one_launcher() -> Iterator[None]:
    """Lets the tests' launcher fork the federations of the block: a launcher of its own would
    import all again. With ``FRESH``, each has its own.
    """
    with contextlib.ExitStack() as stack:
        for name in () if FRESH else LAUNCHING:
            stack.enter_context(patch(name, _shared))
        yield


def vfl_here(*args: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in the folder ``cwd``; returns exit code and output as of a
    process.
    """
    out, errors, words = io.StringIO(), io.StringIO(), [str(word) for word in args]
    with (
        one_launcher(),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        code = run_for_status(lambda: cli.main(words, prog_name="vfl", standalone_mode=False))
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())
