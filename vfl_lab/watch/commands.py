"""The command ``vfl watch``, which shows the progress of a run in a browser."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click

from vfl.summary.run_argument import RUNS, locate_run
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, add_stop_text


@click.command(epilog=EXIT_CODES)
@click.argument("run", metavar="[RUN|FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--port",
    default=0,
    show_default="a free port",
    type=click.IntRange(0, 65_535),
    help="Listen on this port of 127.0.0.1.",
)
# Programs of a run start ``vfl watch`` with this hidden option: see ``vfl_common.process.program``.
@click.option("--beside", is_flag=True, hidden=True)
def watch(run: Path | None, port: int, beside: bool) -> None:
    """Show the progress of a run in a browser.

    The page shows phases, rounds, learning curves, remaining time, processes, bytes and the log.
    RUN is the folder of a run, or of one process in it. FOLDER is a folder of runs, whose newest
    run is shown; when another run begins, the page switches to it. The default is the folder runs.
    Only files on this machine are read, and only while a browser has the page open. The printed
    link contains a token: anyone who has the link can see the page. Ctrl-C ends the page, not the
    run.

    \b
    Examples:
      vfl watch
      vfl watch runs/20260101-120000-digits-1f2e
      ssh -L 8700:127.0.0.1:8700 host vfl watch --port 8700      a run on another machine
    """
    path = RUNS if run is None else locate_run(run)
    if not path.is_dir() and not beside:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: no such folder. Give the folder of a run, or a folder of runs.",
        )
    try:
        from vfl_lab.watch.serve import Page, Picture, listen
    except ImportError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            "vfl watch: FastAPI or uvicorn cannot be imported "
            f"({str(error).splitlines()[0]}). Run pip install '.[watch]' in the clone of vfl.",
        ) from None

    try:
        listening = listen(port)
    except OSError as error:
        raise InputError(
            Code.ADDRESS_IN_USE,
            f"--port {port}: cannot listen on 127.0.0.1 ({os.strerror(error.errno or 0)}). "
            "Choose another port.",
        ) from None
    with listening, add_stop_text("the run goes on"):
        page = Page(Picture(path), listening)
        click.echo(page.link)
        sys.stdout.flush()
        page.serve(_end_with_parent if beside else None)


def _end_with_parent(end: Callable[[], None]) -> None:
    """Calls ``end`` when the parent program ends, which closes this process's standard input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        end()

    threading.Thread(target=wait, name="starter", daemon=True).start()
