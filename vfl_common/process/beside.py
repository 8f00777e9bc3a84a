"""Serves the page of a run from a separate process, so that the run itself does not slow down."""

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
    help="Show the run in a browser; print the page's link.",
)
# The maximum time in which the page sends its last updates to browsers.
_CLOSE_S = 5.0


@contextlib.contextmanager
def watch_page(path: Path, *, wanted: bool) -> Iterator[None]:
    """Runs ``vfl watch`` on ``path`` while the block runs, if ``wanted`` is true. Prints the link
    of the page on standard error.

    ``path``: the folder of a run or of several runs, which may be created later. Raises InputError
    if the page cannot be served.
    """
    if not wanted:
        yield
        return
    # The page's process ends when this process ends: see ``vfl_lab.commands``.
    command = [sys.executable, "-P", "-m", "vfl", "watch", str(path), "--beside"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # In a separate session, Ctrl-C at the terminal reaches only this process.
            start_new_session=True,
        ) as page,
    ):
        try:
            link = page.stdout.readline().decode().strip() if page.stdout is not None else ""
            if not link:
                page.wait(_CLOSE_S)
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                raise InputError(
                    Code.CONFIG_INVALID,
                    "--watch: the page cannot be served "
                    f"({lines[-1].removeprefix('error: ') if lines else 'reason unknown'}). "
                    "Correct the problem, or run without --watch.",
                )
            click.echo(f"watch the run: {link}", err=True)
            yield
        finally:
            if page.stdin is not None:
                page.stdin.close()
            try:
                page.wait(_CLOSE_S)
            except subprocess.TimeoutExpired:
                page.kill()
