"""Runs programs of a run as child processes, and starts them again after a crash."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from vfl.launcher.forks import Launcher, can_fork
from vfl.launcher.processes import Process
from vfl_common.errors import VflError
from vfl_common.run_folder import RunFolder

log = logging.getLogger(__name__)
State = Literal["runs", "done", "failed"]
# The exit codes after which the same command goes on with the run: a lost peer, a full disk, a
# signal. A negative status is a signal, too.
_AGAIN = frozenset({3, 6, 130})
_ORDERLY_S, _POLL_S = 10.0, 0.05
_MIN_WAIT_S, _MAX_WAIT_S = 0.5, 10.0


class Starter:
    """Starts the programs of runs. A launcher that has imported torch forks them, and stays for
    some time after the last run.

    Args:
        keep_s: The seconds for which the launcher stays; 0 to start an interpreter for each.
        before: The beginning of the command lines, for example of Slurm. Then nothing is forked.
    """

    def __init__(self, keep_s: float = 0.0, before: Sequence[str] = ()) -> None:
        self._keep_s, self._before, self._lock = keep_s, before, threading.Lock()
        self._used_s = 0.0
        self._launcher: Launcher | None = None

    def start(
        self,
        name: str,
        args: Sequence[str],
        folder: Path,
        threads: int,
        events: queue.SimpleQueue[dict[str, Any]],
    ) -> Process:
        """Starts a program. For the arguments, see ``Process``."""
        return Process(
            name,
            args,
            folder,
            threads=threads,
            events=events,
            launcher=self._get_launcher() if threads == 1 else None,
            before=self._before,
        )

    def _get_launcher(self) -> Launcher | None:
        if not self._keep_s or self._before or not can_fork():
            return None
        with self._lock:
            self._used_s = time.monotonic()
            if self._launcher is None or self._launcher.has_ended:
                self._launcher = Launcher()
            return self._launcher

    def end_if_idle(self, *, is_used: bool) -> None:
        """Ends the launcher if it was not used for ``keep_s``."""
        with self._lock:
            if is_used:
                self._used_s = time.monotonic()
            launcher = self._launcher
            if launcher is None or time.monotonic() - self._used_s <= self._keep_s:
                return
            self._launcher = None
        launcher.close()

    def close(self) -> None:
        """Ends the launcher."""
        with self._lock:
            launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.close()


class Child:
    """A program that is started again until it has finished or failed.

    Args:
        name: The name of the party or the server.
        args: The program and its arguments.
        folder: The folder for its output.
        on_event: Called with each event of the program, in another thread.
        on_change: Called after each change of ``state``, in another thread.
        is_finished: Returns whether the run has been finished. A program that was killed at its
            very end must not be started again, because it would begin another run.
        threads: The number of threads of torch.
        starter: Starts the program.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        folder: Path,
        *,
        on_event: Callable[[dict[str, Any]], None],
        on_change: Callable[[], None],
        is_finished: Callable[[], bool],
        threads: int = 1,
        starter: Starter | None = None,
    ) -> None:
        self._starter = starter or Starter()
        self.state: State = "runs"
        self.reason, self.starts = "", 0
        self._name, self._args, self._folder, self._threads = name, args, folder, threads
        self._on_event, self._on_change = on_event, on_change
        self._is_finished = is_finished
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"child {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the program: SIGTERM, and later SIGKILL."""
        self._stopping.set()
        self._thread.join(_ORDERLY_S + 5.0)

    def _run(self) -> None:
        wait_s = _MIN_WAIT_S
        while not self._stopping.is_set():
            if self._is_finished():
                self._end("done", "")
                return
            begun_s = time.monotonic()
            try:
                status, sentence = self._run_once()
            except (FileNotFoundError, PermissionError) as error:
                status, sentence = 1, f"cannot be started ({error})"
            except OSError as error:
                # For example a full disk, or no descriptor: the same command is tried again.
                log.warning("%s cannot be started: %s", self._name, error)
                status, sentence = -1, str(error)
            except Exception as error:
                log.exception("%s cannot be run", self._name)
                status, sentence = 1, f"cannot be run ({type(error).__name__})"
            if self._stopping.is_set():
                return
            if status == 0:
                self._end("done", "")
                return
            if status > 0 and status not in _AGAIN:
                self._end("failed", sentence)
                return
            # A program that ran for a while is started again at once.
            wait_s = _MIN_WAIT_S if time.monotonic() - begun_s > 60.0 else wait_s
            self._stopping.wait(wait_s)
            wait_s = min(_MAX_WAIT_S, 2 * wait_s)

    def _end(self, state: State, reason: str) -> None:
        self.reason, self.state = reason, state
        self._on_change()

    def _run_once(self) -> tuple[int, str]:
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        process = self._starter.start(self._name, self._args, self._folder, self._threads, events)
        self.starts += 1
        stop_s = 0.0
        while process.status is None:
            if self._stopping.is_set():
                if not stop_s:
                    process.signal(signal.SIGTERM)
                    stop_s = time.monotonic() + _ORDERLY_S
                elif time.monotonic() > stop_s:
                    process.signal(signal.SIGKILL)
            try:
                self._on_event(events.get(timeout=_POLL_S))
            except queue.Empty:
                continue
        process.wait()
        while not events.empty():
            self._on_event(events.get())
        return process.status or 0, process.sentence() if process.status else ""


def is_finished(folder: Path, run: str, name: str) -> bool:
    """Returns whether a party or the server has finished a run. ``folder``: The folder of runs."""
    try:
        return bool(RunFolder(folder / run / name, run).facts().get("finished"))
    except VflError:
        return False
