"""Runs a program: adds the commands of plug-ins and deprecated names, turns errors into one message
and an exit code, ends in an orderly way on SIGTERM, and reduces the work of the garbage collector.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import resource
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from vfl_common.errors import Code, InputError, VflError
from vfl_common.process import signals
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
            reduce_gc()
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
        _print_error(f"error: {clean(str(error), LINE)}")
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt, Stopped) as stop:
        text = f"stopped: {stop}" if str(stop) else "stopped"
        log.warning(text, extra={"event": "stopped"})
        _print_error(text)
        return STOPPED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MemoryError:
        log.exception("no memory", extra={"event": "failed"})
        _print_error(
            "error: this machine does not have enough memory. Give the process more memory, or use "
            "fewer rows or columns."
        )
        return 2
    except Exception as error:
        if signals.is_stopping():
            # A library has replaced the stop exception by this error.
            log.warning("stopped", exc_info=True, extra={"event": "stopped"})
            _print_error("stopped")
            return 130
        log.exception("internal error", extra={"event": "failed"})
        _print_error(traceback.format_exc().rstrip())
        _print_error(f"error: internal: {type(error).__name__}: {clean(str(error), LINE)}")
        return 1
    return result if isinstance(result, int) else 0


def _print_error(text: str) -> None:
    # Standard error may be on the disk that is full, and the exit code is what matters then.
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


class PluginGroup(click.Group):
    """A group with its own commands and the commands that packages add as entry points.

    Args:
        entry_point_group: The group of the entry points, such as ``vfl.commands``.
        modules: {command: "module:function"} of the program's own commands that are imported when
            they are listed or called.
    """

    def __init__(
        self, *args: Any, entry_point_group: str, modules: Mapping[str, str] = {}, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._modules = entry_point_group, modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        own_names = {*super().list_commands(ctx), *self._modules}
        return sorted({*own_names, *(entry.name for entry in self._entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._modules:
            module, _, name = self._modules[cmd_name].partition(":")
            own_command: click.Command = getattr(import_module(module), name)
            return own_command
        return super().get_command(ctx, cmd_name) or self._load_command(cmd_name)

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self._group))

    def _load_command(self, name: str) -> click.Command | None:
        entry_point = next((entry for entry in self._entry_points() if entry.name == name), None)
        if entry_point is None:
            return None
        try:
            command = entry_point.load()
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"the command {name!r} of {entry_point.value} cannot be loaded "
                f"({type(error).__name__}: {error}). Reinstall or remove it.",
            ) from error
        if not isinstance(command, click.Command):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{entry_point.value}: must be a click command (got {type(command).__name__}). "
                f"Correct its entry point {self._group}.",
            )
        return command


Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _warn(old: str, new: str) -> None:
    click.echo(f"warning: {old} is deprecated. Use {new}.", err=True)


def make_old_name(command: click.Command, old: str, program: str) -> click.Command:
    """Returns a hidden alias ``old`` of a command. The alias prints a warning and runs the
    command.
    """
    alias, run = copy.copy(command), command.callback
    if run is None:
        raise ValueError(f"command {command.name} has no callback")

    @wraps(run)
    def warn_and_run(*args: Any, **kwargs: Any) -> Any:
        _warn(f"`{program} {old}`", f"`{program} {command.name}`")
        return run(*args, **kwargs)

    alias.name, alias.hidden, alias.callback = old, True, warn_and_run
    return alias


def flag_with_old_name(new: str, old: str, text: str) -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds a flag, such as ``--student``, and a hidden flag with its old
    name, which prints a warning. ``text``: the flag's help.
    """

    def read_old_flag(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            _warn(old, new)
            context.meta[f"vfl{old}"] = True

    def read_flag(context: click.Context, _: click.Parameter, value: bool) -> bool:
        return value or bool(context.meta.get(f"vfl{old}"))

    def add_flags(command: Decorated) -> Decorated:
        # The old flag is eager, so that click reads it before the new flag.
        hidden = click.option(
            old,
            is_flag=True,
            hidden=True,
            is_eager=True,
            expose_value=False,
            callback=read_old_flag,
        )
        return click.option(new, is_flag=True, help=text, callback=read_flag)(hidden(command))

    return add_flags


# The number of new objects between two collections. A step creates thousands of objects, of which
# hardly any are in cycles.
YOUNG = 20_000


# The garbage collector searches for reference cycles. Objects that are not in cycles are freed by
# reference counting as before.
def reduce_gc() -> None:
    """Makes the collector run less often, and exempts the existing objects, which are mainly
    torch's modules.
    """
    gc.freeze()
    _raise_threshold()


@contextlib.contextmanager
def reduce_gc_in_block() -> Iterator[None]:
    """Makes the collector run less often during the block, for a process that also runs other code.

    It does not freeze objects, because unfreezing them would also unfreeze objects that other code
    has frozen.
    """
    thresholds = gc.get_threshold()
    _raise_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _raise_threshold() -> None:
    """Raises the threshold to ``YOUNG``. A threshold of 0, which turns the collector off, is
    kept.
    """
    threshold, *others = gc.get_threshold()
    if threshold:
        gc.set_threshold(max(threshold, YOUNG), *others)


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Turns the collector off during a block of imports, because torch's modules have a million
    objects and none of them can be freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
