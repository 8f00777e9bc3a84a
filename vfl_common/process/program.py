"""Runs any of the three programs: exit codes, errors as one sentence, SIGTERM as an orderly end."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import click

from vfl_common.errors import VflError
from vfl_common.process import garbage
from vfl_common.process.logs import EarlyLog
from vfl_common.text import LINE, clean

EXIT_CODES = """\b
Exit codes:
  0    done
  1    an internal error (please report it; the log has the details)
  2    the input cannot be used, here or at a peer: file, recipe, certificate, address, data, message
  3    a party was lost, or was too slow, past the recipe's deadline
  4    another party stopped the run
  130  stopped by SIGINT or SIGTERM
"""  # noqa: E501

METRICS = (
    "Serve metrics for Prometheus at HOST:PORT; PORT alone: on 127.0.0.1; port 0: a free one. "
    "[default: no port]"
)

# Of options, for the group of all commands of a program.
NAMES: dict[str, Any] = {
    "token_normalize_func": lambda name: "out" if name == "output" else name,
}

# Which is ignored by default, and nothing else here uses.
_NUDGE = signal.SIGURG
# On a busy machine the wait may begin late.
_PAUSES_S = (0.05, 0.5, 2.0)

_last: list[Callable[[], None]] = []

log = logging.getLogger(__name__)


class Stopped(BaseException):
    """SIGTERM as an exception: unwinds like Ctrl-C, past all error handlers. Its text, if any, is
    for the person.
    """


@contextlib.contextmanager
def stopping(text: str) -> Iterator[None]:
    """Says ``text`` of a stop in the block that says nothing itself."""
    try:
        yield
    except (KeyboardInterrupt, Stopped) as stop:
        if str(stop):
            raise
        raise Stopped(text) from None


def resumable(*, fresh: bool) -> contextlib.AbstractContextManager[None]:
    """Says of a stop in the block how the run goes on. ``fresh``: the command begins a new run."""
    return stopping(f"the same command{' without --fresh' if fresh else ''} resumes the run")


def run_program(command: click.Command, name: str, *, private: bool = False) -> NoReturn:
    """Runs a click command as a program and exits. An error becomes one sentence on standard error
    and an exit code.

    ``private``: no other user may read the files and folders that it makes, whatever the umask.
    Nothing dumps its memory if it crashes: that would put keys and tables on the disk.

    The process exits without taking the interpreter down, because threads outside Python may still
    run, and one that then uses the interpreter, for example to release a tensor, aborts the
    process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if private:
        os.umask(os.umask(0o077) | 0o077)
    signal.signal(signal.SIGTERM, _stop)
    _heed_at_once()
    garbage.seldom()
    # Until a run has a folder for its log.
    logging.getLogger().addHandler(EarlyLog())
    _leave(exit_status(lambda: command.main(prog_name=name, standalone_mode=False)))


def do_last(act: Callable[[], None]) -> None:
    """Has ``act`` called immediately before the process exits, if ``run_program`` runs it.

    For the note that a run is finished: a process that is killed after it would begin another run
    when it is started again.
    """
    _last.append(act)


def _leave(status: int) -> NoReturn:
    """Flushes output and logs, then exits without the interpreter's other steps."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # The process exits here anyway.
        signal.signal(number, signal.SIG_IGN)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader may be gone.
        with contextlib.suppress(OSError, ValueError):
            # It was closed from the beginning.
            if stream is not None:
                stream.flush()
    for act in _last:
        # Without the note, the same command finds that nothing is left to do.
        with contextlib.suppress(OSError):
            act()
    os._exit(status)


def exit_status(call: Callable[[], object]) -> int:
    """Calls ``call``; an error becomes one sentence on standard error. Returns the exit code."""
    try:
        result = call()
    except VflError as error:
        log.error("%s", error, extra={"event": "failed", "code": error.code.name})
        click.echo(f"error: {clean(str(error), LINE)}", err=True)
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt, Stopped) as stop:
        text = f"stopped: {stop}" if str(stop) else "stopped"
        log.warning(text, extra={"event": "stopped"})
        click.echo(text, err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MemoryError:
        text = (
            "there is not enough memory on this machine: give the process more, or take fewer "
            "rows or columns"
        )
        log.exception("no memory", extra={"event": "failed"})
        click.echo(f"error: {text}", err=True)
        return 2
    except Exception as error:
        log.exception("internal error", extra={"event": "failed"})
        traceback.print_exc()
        click.echo(f"error: internal: {type(error).__name__}: {clean(str(error), LINE)}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _heed_at_once() -> None:
    """Makes signals interrupt the main thread even if it begins to wait just as one comes.

    The interpreter calls a signal's handler between two steps of the main thread. A wait that
    begins after the last of them is not interrupted, and may be long. So each signal also wakes a
    thread, which interrupts the wait soon after.
    """
    read, write = socket.socketpair()
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    signal.signal(_NUDGE, lambda _signal, _frame: None)
    main = threading.main_thread().ident or 0

    def nudge(_kept_open: socket.socket) -> None:
        while number := read.recv(1):
            for pause_s in _PAUSES_S if number[0] in (signal.SIGINT, signal.SIGTERM) else ():
                time.sleep(pause_s)
                signal.pthread_kill(main, _NUDGE)

    threading.Thread(target=nudge, args=[write], name="signals", daemon=True).start()


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise Stopped
