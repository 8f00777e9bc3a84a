"""Carries out orders in processes of this machine.

    python -m vfl.jobs.workers MODULE:FUNCTION

The command is such a process: an order is a line of JSON on its standard input, an answer a line on
its standard output. It ends when its standard input does, so it does not outlive its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, Self

from vfl.jobs.answers import Order, answer, check, process_error
from vfl.launcher.processes import environment


class JobWorkers:
    """A number of processes for a block. They are killed at its end, or by ``close``.

    ``does``: ``module:function``, which carries out an order. ``threads``: for torch and its
    libraries in each process. Raises OSError if they cannot be started.
    """

    def __init__(self, does: str, number: int, threads: int) -> None:
        self._all: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(number):
                self._all.append(worker := _Worker(does, threads))
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def run(self, order: Order) -> None:
        """Has an idle process carry out an order, and waits for its answer. Raises VflError."""
        worker = self._idle.get()
        try:
            worker.run(order)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kills all processes; their orders fail."""
        # All are killed first: an interruption may come during a wait.
        for worker in self._all:
            worker.kill()
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """One process; it imports while the first order is made."""

    def __init__(self, does: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, does],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(threads, ()),
            # Ctrl-C reaches this process alone, which ends the others.
            start_new_session=True,
            text=True,
        )
        # Like the interpreter, this skips entries that are not text.
        self._send([path for path in sys.path if isinstance(path, str)])

    def run(self, order: Order) -> None:
        """Carries out an order. Raises VflError."""
        self._send(order)
        line = self._output.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            how = (
                f"was killed by {signal.Signals(-status).name}"
                if status < 0
                else f"ended with exit code {status}"
            )
            raise process_error(how)
        check(json.loads(line))

    def kill(self) -> None:
        """Ends the process at once: nothing of an abandoned run is needed."""
        self._process.kill()

    def close(self) -> None:
        """Waits for its end, after ``kill``."""
        self._process.wait()
        # Closing fails if there is input that the process has not read.
        with contextlib.suppress(OSError):
            self._input.close()
        # This waits for a thread that reads the output, which has ended.
        self._output.close()

    def _send(self, what: Any) -> None:
        # A dead process is reported by its missing answer.
        with contextlib.suppress(OSError):
            self._input.write(json.dumps(what) + "\n")
            self._input.flush()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        return self._process.stdin

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        return self._process.stdout


# -- the process's own side
# ----------------------------------------------------------------------


def _serve(does: str) -> None:
    """Carries out orders. It hides both pipes from their code: an encoder reads nothing, and its
    prints are not answers.
    """
    orders_in, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=[orders_in, orders], daemon=True).start()
    sys.path[:] = json.loads(orders.get())
    while True:
        answers.write(json.dumps(answer(does, json.loads(orders.get()))) + "\n")
        answers.flush()


def _read(orders_in: IO[str], orders: queue.SimpleQueue[str]) -> None:
    for line in orders_in:
        orders.put(line)
    # The run's result is no longer needed.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
