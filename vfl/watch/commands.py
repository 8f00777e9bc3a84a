"""``vfl watch``: a page that shows a run while it goes on."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click

from vfl.report.run_argument import RUNS, meant
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES, stopping


@click.command(epilog=EXIT_CODES)
@click.argument("run", metavar="[RUN|FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--port",
    default=0,
    show_default="a free one",
    type=click.IntRange(0, 65_535),
    help="Port of 127.0.0.1.",
)
# How a program shows its own run: see ``vfl_common.process.beside``.
@click.option("--beside", is_flag=True, hidden=True)
def watch(run: Path | None, port: int, beside: bool) -> None:
    """Show a run in a browser while it goes on: phases, rounds, curves, time left, who is here,
    bytes, the log.

    RUN is a run's folder, or a process's folder in it. FOLDER is a folder of runs, of which the
    newest is shown, and the next one as soon as it begins; if both are left out, the folder runs.
    Only files of this machine are read, and only while a browser has the page open. The link that
    is printed has a token: whoever has it can see the page. Ctrl-C ends the page, and not the run.

    \b
    Examples:
      vfl watch
      vfl watch runs/20260101-120000-digits-1f2e
      ssh -L 8700:127.0.0.1:8700 host vfl watch --port 8700      a run on another machine
    """
    path = RUNS if run is None else meant(run)
    if not path.is_dir() and not beside:
        text = f"{path}: no such folder; give the folder of a run, or a folder of runs"
        raise InputError(Code.FILE_INVALID, text)
    try:
        from vfl.watch.serve import Page, listen
    except ImportError as error:
        text = f"FastAPI or uvicorn cannot be imported here ({str(error).splitlines()[0]})"
        raise InputError(
            Code.CONFIG_INVALID, f"vfl watch: {text}; pip install '.[watch]' in the clone of vfl"
        ) from None
    from vfl.watch.picture import Picture

    try:
        listening = listen(port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        text = f"--port {port}: cannot listen on 127.0.0.1 ({why}); choose another port"
        raise InputError(Code.ADDRESS_IN_USE, text) from None
    with listening, stopping("the run goes on"):
        page = Page(Picture(path), listening)
        click.echo(page.link)
        sys.stdout.flush()
        page.serve(_until_alone if beside else None)


def _until_alone(end: Callable[[], None]) -> None:
    """Has ``end`` called when the program that started this one has ended: its end of our standard
    input is closed.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        end()

    threading.Thread(target=wait, name="starter", daemon=True).start()
