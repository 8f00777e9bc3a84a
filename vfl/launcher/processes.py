"""Starts, watches and ends the processes of a simulated federation."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vfl.launcher.forks import Forked, Launcher
from vfl_common.errors import Code, UnwritableError, VflError

# Seconds between SIGTERM and SIGKILL.
_ORDERLY_S = 5.0
# The exit code for a process that was killed; see EXIT_CODES.
LOST = 3


# {exit code of a process: code of the error}
_CODES = {
    2: Code.CONFIG_INVALID,
    3: Code.PARTY_LOST,
    4: Code.ABORTED,
    UnwritableError.EXIT_CODE: Code.FILE_INVALID,
}


class ProcessFailed(VflError):  # noqa: N818 - it says what happened
    """A process of the federation failed. ``vfl`` ends with the same exit code."""

    def __init__(self, name: str, sentence: str, exit_code: int) -> None:
        super().__init__(_CODES.get(exit_code, Code.INTERNAL), f"{name}: {sentence}", party=name)
        self._exit_code = exit_code

    @property
    def exit_code(self) -> int:
        """The process's exit code."""
        return self._exit_code


class Process:
    """A process of vfl-server or vfl-party.

    Its standard error is written to ``<folder>/stderr``. The JSON events on its standard output are
    put into ``events``, or written to ``<folder>/stdout`` without ``events``.

    Args:
        name: the name of the party or the server.
        args: the program and its arguments.
        folder: the folder for the output; it is created if it does not exist.
        threads: the number of threads of torch and its libraries.
        modules: folders with the user's own modules (encoders of kind ``custom``, plug-ins).
        launcher: the launcher that forks the process with the launcher's ``threads``. Without it,
            the process is started with a new interpreter.
        before: the beginning of the command line, for example of Slurm; without ``launcher``.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        folder: Path,
        *,
        threads: int,
        modules: Sequence[Path] = (),
        events: queue.SimpleQueue[dict[str, Any]] | None = None,
        launcher: Launcher | None = None,
        before: Sequence[str] = (),
    ) -> None:
        self.name, self.args = name, tuple(args)
        self._stderr = folder / "stderr"
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing is written to this pipe. The process ends when the pipe is closed.
        stdin, self._stdin = os.pipe()
        events_in: int | None = None
        if events is not None:
            events_in, stdout = os.pipe()
        else:
            stdout = os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._process: subprocess.Popen[bytes] | Forked
        with contextlib.ExitStack() as ends, self._stderr.open("ab") as stderr:
            for end in (stdin, stdout, self._stdin, events_in):
                if end is not None:
                    ends.callback(os.close, end)
            if launcher is not None:
                self._process = launcher.start(
                    args,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr.fileno(),
                    cwd=Path.cwd(),
                    modules=modules,
                )
            else:
                self._process = subprocess.Popen(
                    [*before, sys.executable, "-P", "-m", "vfl.launcher.child", *args],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    env=make_environment(threads, modules),
                    # Ctrl-C at the terminal reaches only `vfl`, which then ends all processes.
                    start_new_session=True,
                )
            # The process has these ends, and this object has the others.
            ends.pop_all()
            os.close(stdin)
            os.close(stdout)
        self._reader: threading.Thread | None = None
        if events is not None and events_in is not None:
            self._reader = threading.Thread(
                target=_read_events, args=[events_in, events], daemon=True
            )
            self._reader.start()

    @property
    def status(self) -> int | None:
        """The exit code, or None while the process runs. A negative number is the signal that
        killed the process.
        """
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; does nothing if the process has ended."""
        self._process.send_signal(number)

    def wait(self) -> None:
        """Waits until the process has ended and its last event has been read."""
        self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def sentence(self) -> str:
        """Returns a text that says why the process ended: its error, or the signal that killed
        it.
        """
        status = self.status or 0
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        lines = self._stderr.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if errors:
            return errors[-1]
        last = next(
            (line.strip() for line in reversed(lines) if line.strip()),
            "nothing on its standard error",
        )
        return f"ended with exit code {status} ({last})"

    def failure(self) -> ProcessFailed:
        """Returns the error to raise after the process has failed."""
        status = self.status or 0
        return ProcessFailed(self.name, self.sentence(), LOST if status < 0 else status)


def make_environment(threads: int, modules: Sequence[Path]) -> dict[str, str]:
    """Returns the environment variables of a child: those of this process, the number of threads
    for libraries, and the folders from which it imports modules.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if modules:
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [*map(str, modules), os.environ.get("PYTHONPATH", "")])
        )
    return environment


def _read_events(fd: int, events: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Puts the events of a process's standard output into ``events`` until the output ends."""
    with os.fdopen(fd, encoding="utf-8", errors="replace") as lines:
        for event in parse_events(lines):
            events.put(event)


def parse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the events among the lines of a program's standard output. Other lines, for example of
    libraries, are ignored.
    """
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            yield event


def find_culprit(ended: Sequence[Process]) -> Process:
    """Returns the process that caused the failure. ``ended``: the failed processes, in the order in
    which they ended.

    Processes with invalid input (exit code 2) and defects (1) rank first, then killed processes,
    then processes that missed a deadline (3), then processes that another process stopped (4). With
    the same rank, a party comes before the server, because the server only repeats a party's
    report.
    """
    return min(
        ended, key=lambda process: (_rank(process.status or 0), "vfl-server" in process.args)
    )


def _rank(status: int) -> int:
    if status in (1, 2):
        return 0
    if status < 0:
        return 1
    return {LOST: 2, 4: 3}.get(status, 1)


def end_all(processes: Sequence[Process]) -> None:
    """Sends SIGTERM to all running processes, and later SIGKILL to those that have not ended.
    Returns when all have ended.
    """
    try:
        for process in processes:
            process.signal(signal.SIGTERM)
        wait_all(processes, _ORDERLY_S)
    finally:
        # The processes are also killed after a second Ctrl-C.
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            process.wait()


def wait_all(processes: Sequence[Process], timeout_s: float) -> bool:
    """Waits for all processes to end, and returns whether they ended within ``timeout_s``."""
    give_up_s = time.monotonic() + timeout_s
    while any(process.status is None for process in processes):
        if time.monotonic() >= give_up_s:
            return False
        time.sleep(0.05)
    return True
