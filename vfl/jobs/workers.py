"""Starts worker processes on this machine, and carries out orders in them.

    python -m vfl.jobs.workers MODULE:FUNCTION

This command is a worker process. It reads an order as a line of JSON from standard input, and
writes the answer as a line to standard output. It ends when its standard input is closed, so it
ends with its parent.
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
from vfl.launcher.processes import make_environment


class JobWorkers:
    """Worker processes, as a context manager. They are killed at the end of the block.

    Args:
        does: The function that carries out an order, as ``module:function``.
        number: The number of processes.
        threads: The number of threads of torch and its libraries in each process.

    Raises OSError if a process cannot be started.
    """

    def __init__(self, does: str, number: int, threads: int) -> None:
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        try:
            for _ in range(number):
                self._workers.append(worker := _Worker(does, threads))
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def run(self, order: Order) -> None:
        """Carries out an order in an idle process, and waits for its answer. Raises VflError."""
        worker = self._idle.get()
        try:
            worker.run(order)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kills all processes. Their unfinished orders fail."""
        # All processes are killed before the first wait, which may be interrupted.
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """The parent's side of one worker process."""

    def __init__(self, does: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, does],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=make_environment(threads, ()),
            # In its own session, the worker does not get Ctrl-C. The parent ends it instead.
            start_new_session=True,
            text=True,
        )
        # Entries that are not text are skipped, because the interpreter ignores them too.
        self._send([path for path in sys.path if isinstance(path, str)])

    def run(self, order: Order) -> None:
        """Sends an order to the process, and waits for its answer. Raises VflError."""
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
        """Kills the process. Its unfinished run is not needed."""
        self._process.kill()

    def close(self) -> None:
        """Waits for the end of the process after ``kill``, and closes its pipes."""
        self._process.wait()
        # Closing raises an error if the process has not read all input.
        with contextlib.suppress(OSError):
            self._input.close()
        # If another thread is reading the output, this waits for it.
        self._output.close()

    def _send(self, message: Any) -> None:
        # If the process has ended, ``run`` notices that the answer is missing.
        with contextlib.suppress(OSError):
            self._input.write(json.dumps(message) + "\n")
            self._input.flush()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None  # noqa: S101 - stdin is a pipe
        return self._process.stdin

    @property
    def _output(self) -> IO[str]:
        assert self._process.stdout is not None  # noqa: S101 - stdout is a pipe
        return self._process.stdout


# The functions below run in the worker process.


def _serve(does: str) -> None:
    """Carries out orders until standard input is closed.

    The code of an order cannot use the pipes to the parent: its standard input is empty, and its
    standard output goes to standard error.
    """
    order_lines, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(2, 1)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=[order_lines, orders], daemon=True).start()
    sys.path[:] = json.loads(orders.get())
    while True:
        answers.write(json.dumps(answer(does, json.loads(orders.get()))) + "\n")
        answers.flush()


def _read_orders(order_lines: IO[str], orders: queue.SimpleQueue[str]) -> None:
    for line in order_lines:
        orders.put(line)
    # The parent has closed the pipe, so it does not need the result.
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
