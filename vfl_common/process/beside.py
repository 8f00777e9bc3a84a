"""The page of a run beside the run itself: another process, so that the run has no work with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from vfl_common.errors import Code, InputError

WATCH = click.option(
    "--watch",
    is_flag=True,
    help="Show the run in a browser while it goes on: a link to a page of this machine is printed "
    "(see vfl watch).",
)
# For the page to send what is new to those who look.
_LAST_S = 5.0


@contextlib.contextmanager
def watched(path: Path, *, wanted: bool) -> Iterator[None]:
    """Has ``vfl watch`` show ``path`` while the block runs, if it is ``wanted``; prints its link on
    standard error.

    ``path``: a run's folder, or a folder of runs; it may come later. Raises InputError if the page
    cannot be served.
    """
    if not wanted:
        yield
        return
    # It ends when this process is gone: see ``vfl.watch.commands``.
    command = [sys.executable, "-P", "-m", "vfl", "watch", str(path), "--beside"]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            # Ctrl-C at the terminal reaches us alone.
            start_new_session=True,
        ) as page,
    ):
        try:
            link = page.stdout.readline().decode().strip() if page.stdout is not None else ""
            if not link:
                page.wait(_LAST_S)
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                why = lines[-1].removeprefix("error: ") if lines else "it has not said why"
                text = f"--watch: the page cannot be served: {why}"
                raise InputError(Code.CONFIG_INVALID, text)
            click.echo(f"watch the run: {link}", err=True)
            yield
        finally:
            if page.stdin is not None:
                page.stdin.close()
            try:
                page.wait(_LAST_S)
            except subprocess.TimeoutExpired:
                page.kill()
