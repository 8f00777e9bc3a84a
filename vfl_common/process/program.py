"""Runs a program: turns errors into one message and an exit code, and ends in an orderly way on
SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import click

from vfl_common.errors import VflError
from vfl_common.process import garbage, signals
from vfl_common.process.logs import buffer_early_lines, log_to_stdout
from vfl_common.process.signals import Stopped
from vfl_common.text import LINE, clean

EXIT_CODES = """\b
Exit codes:
  0    done
  1    an internal error (please report it; the log has the details)
  2    the input cannot be used, here or at a peer: file, recipe, certificate, address, data
  3    a party was lost, or too slow for a deadline of the recipe
  4    another party stopped the run
  5    done, but not as requested: scores without the others, a worse model, a drifted column
  6    the disk is full: free some space; the same command resumes the run
  130  stopped by SIGINT or SIGTERM
"""

METRICS = click.option(
    "--metrics",
    default="",
    metavar="HOST:PORT",
    help="Serve Prometheus metrics and /healthz at this address, or port of 127.0.0.1. "
    "[default: no port]",
)
LINGER = click.option(
    "--metrics-linger",
    "linger_s",
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.0, 86_400.0),
    help="Serve the metrics for this long after the run has ended.",
)


def _read_log_stdout(_context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        log_to_stdout()


LOG_STDOUT = click.option(
    "--log-stdout",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_read_log_stdout,
    help="Write the lines of log.jsonl, instead of events, to standard output.",
)

# The exit code of a program that a signal has stopped.
STOPPED = 130

# click's context settings of each program, which make --output an alias of --out.
NAMES: dict[str, Any] = {
    "token_normalize_func": lambda name: "out" if name == "output" else name,
}

_last: list[Callable[[], None]] = []
_afterwards: list[Callable[[threading.Event], None]] = []

log = logging.getLogger(__name__)
# Without a handler, logging prints warnings to standard error until a log is set up.
log.addHandler(logging.NullHandler())


@contextlib.contextmanager
def add_stop_text(text: str) -> Iterator[None]:
    """Gives a stop exception in the block the message ``text``, if it has no message."""
    try:
        yield
    except (KeyboardInterrupt, Stopped) as stop:
        if str(stop):
            raise
        raise Stopped(text) from None


def explain_resuming(*, fresh: bool) -> contextlib.AbstractContextManager[None]:
    """Adds to a stop exception in the block how to resume the run. ``fresh``: whether the command
    begins a new run.
    """
    return add_stop_text(f"the same command{' without --fresh' if fresh else ''} resumes the run")


def run_program(command: click.Command, name: str, *, private: bool = False) -> NoReturn:
    """Runs a click command as a program, and exits. An error becomes one message on standard error
    and an exit code.

    ``private``: whether only the owner may read the files and folders that the program creates, for
    any umask. Core dumps are turned off, because they would put keys and tables on the disk.

    The process exits without shutting down the interpreter. Otherwise a thread outside Python that
    still uses the interpreter, for example to release a tensor, would abort the process.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if private:
        os.umask(os.umask(0o077) | 0o077)

    ended = threading.Event()

    def run() -> object:
        try:
            signals.install_handlers()
            garbage.reduce_gc()
            buffer_early_lines()
            return command.main(prog_name=name, standalone_mode=False)
        finally:
            # From here on, a signal only ends the waits of functions that were registered with
            # ``do_afterwards``.
            signals.set_on_signal(ended)

    _exit_process(run_for_status(run), ended)


def do_last(act: Callable[[], None]) -> None:
    """Registers ``act``, which ``run_program`` calls immediately before the process exits.

    It is used to mark a run as finished. This must be the last step, because a process that is
    killed after it would begin another run when it is started again.
    """
    _last.append(act)


def do_afterwards(act: Callable[[threading.Event], None]) -> None:
    """Registers ``act``, which is called after everything else, including functions of ``do_last``.
    It must return when its event is set; a signal sets the event.

    It is not called if a signal has stopped the program.
    """
    _afterwards.append(act)


def _exit_process(status: int, ended: threading.Event) -> NoReturn:
    """Flushes output and logs, calls the registered functions, and exits without shutting down the
    interpreter. ``ended``: an event that a signal sets.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # The reader of the stream may be gone.
        with contextlib.suppress(OSError, ValueError):
            # A stream that was closed when the process started is None.
            if stream is not None:
                stream.flush()
    for act in _last:
        # An error is ignored: if the run is not marked as finished, the same command finds nothing
        # left to do.
        with contextlib.suppress(OSError):
            act()
    for wait in _afterwards if status != STOPPED else ():
        wait(ended)
    os._exit(status)


def run_for_status(call: Callable[[], object]) -> int:
    """Calls ``call``; prints an error as one message on standard error. Returns the exit code."""
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
        return STOPPED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MemoryError:
        log.exception("no memory", extra={"event": "failed"})
        click.echo(
            "error: this machine does not have enough memory. Give the process more memory, or use "
            "fewer rows or columns.",
            err=True,
        )
        return 2
    except Exception as error:
        if signals.is_stopping():
            # A library has replaced the stop exception by this error.
            log.warning("stopped", exc_info=True, extra={"event": "stopped"})
            click.echo("stopped", err=True)
            return 130
        log.exception("internal error", extra={"event": "failed"})
        traceback.print_exc()
        click.echo(f"error: internal: {type(error).__name__}: {clean(str(error), LINE)}", err=True)
        return 1
    return result if isinstance(result, int) else 0
