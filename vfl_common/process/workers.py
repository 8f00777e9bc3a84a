"""Runs worker processes, which compute for one program on other cores and end when the program
ends.

The programs have threads of gRPC and torch, so they never fork. Each worker is a new process,
``python -m MODULE``. Its standard input is one end of a socket. It reads a message from the socket
and answers it. A message is a list of byte strings: their number and lengths (4 bytes each,
little-endian), then the strings. The first message is not answered. It contains secrets, which
other users could read if they were arguments or environment variables.

A worker that is killed is replaced and its request is repeated. This is safe because each answer
depends only on the first message and the request. A worker ends after its current request when the
other end of the socket is closed, so it does not outlive its parent. It ignores SIGINT and SIGTERM,
which a terminal or systemd sends to all processes of a program, because the parent decides when to
stop.
"""

from __future__ import annotations

import logging
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedIOBase
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import Self, TypeVar

from vfl_common.errors import Code, InputError, InternalError

log = logging.getLogger(__name__)
T = TypeVar("T")
# The function with which a worker answers a request.
Answer = Callable[[list[bytes]], Sequence[bytes]]


class Workers:
    """A pool of worker processes that run during a ``with`` block. Any thread may call it.

    ``submit`` returns at once. Each worker handles one request at a time. Other requests and
    results wait in memory, so the caller must limit their number; ``2 * count`` requests keep all
    workers busy.

    Args:
        module: The module that the workers run, which calls ``work``.
        count: The number of processes.
        task: What the workers do, such as "masked ids", for an error message.
        first: The parts of the first message.
        file: A file descriptor that the workers inherit; its number is their argument.
    """

    def __init__(
        self,
        module: str,
        count: int,
        task: str,
        first: Sequence[bytes],
        file: int | None = None,
    ) -> None:
        self._module, self._count, self._task = module, count, task
        self._first, self._file = first, file
        self._lock, self._ended = threading.Lock(), False
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # Each worker has one thread that waits for its answers.
        self._threads = ThreadPoolExecutor(count, module)

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self._idle.put(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the workers at once. Unfinished futures are cancelled or raise InternalError."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.wait()
            # Closing the stream flushes it, which fails if the worker is gone.
            with suppress(OSError):
                worker.stream.close()

    def submit(self, read: Callable[[list[bytes]], T], *request: bytes) -> Future[T]:
        """Sends a request to the next idle worker. Returns a future of ``read(answer)``."""
        return self._threads.submit(lambda: read(self._ask(request)))

    def _ask(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the answer. Raises InternalError if the worker and its replacement both ended
        during the request.
        """
        worker = self._idle.get()
        try:
            try:
                return worker.ask(request)
            except (OSError, EOFError):
                worker = self._replace(worker)
                return worker.ask(request)
        except (OSError, EOFError):
            raise InternalError(
                f"process {worker.process.pid}, which {self._task}, has ended. See the lines above "
                "for the reason, unless it was killed."
            ) from None
        finally:
            self._idle.put(worker)

    def _start(self) -> _Worker:
        """Starts a worker. Raises InputError if the system cannot start another process."""
        try:
            worker = _Worker(self._module, self._file)
        except OSError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"cannot start another process on this machine ({error.strerror}). End other "
                "programs, or set `threads = 1` in the party file.",
            ) from None
        self._workers.append(worker)
        # An error is ignored here: if the worker has ended already, its first request fails.
        with suppress(OSError):
            send(worker.stream, *self._first)
        return worker

    def _replace(self, gone: _Worker) -> _Worker:
        """Starts another worker in place of ``gone``. Raises EOFError if the pool is closing, and
        InputError as ``_start`` does.
        """
        with self._lock:
            if self._ended:
                raise EOFError
            gone.process.kill()
            gone.process.wait()
            worker = self._start()
            self._workers.remove(gone)
            log.warning(
                "process %d, which %s, has ended; another one takes its place",
                gone.process.pid,
                self._task,
                extra={"event": "replaced"},
            )
            return worker


class _Worker:
    """A worker process and the socket stream to it."""

    def __init__(self, module: str, file: int | None) -> None:
        our_end, worker_end = socket.socketpair()
        files = [] if file is None else [file]
        # The stream keeps this side of the socket open.
        with our_end, worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, files)],
                stdin=worker_end.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=files,
                # In a separate session, Ctrl-C at the terminal reaches only the parent.
                start_new_session=True,
            )
            self.stream: BufferedIOBase = our_end.makefile("rwb")

    def ask(self, request: Sequence[bytes]) -> list[bytes]:
        """Returns the answer. Raises OSError or EOFError if the process has ended."""
        send(self.stream, *request)
        return receive(self.stream)


def work(begin: Callable[[list[bytes]], Answer]) -> None:
    """Runs the main loop of a worker process. ``begin`` gets the first message and returns a
    function that answers all further messages.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as parent:
        serve(parent.makefile("rwb"), begin)


def serve(stream: BufferedIOBase, begin: Callable[[list[bytes]], Answer]) -> None:
    """Answers requests until the other side closes the stream."""
    try:
        answer = begin(receive(stream))
        while True:
            send(stream, *answer(receive(stream)))
    except (EOFError, ConnectionError):
        return


def send(stream: BufferedIOBase, *parts: bytes) -> None:
    """Writes a message. Raises OSError if the other side has closed the stream."""
    stream.write(struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)))
    stream.write(b"".join(parts))
    stream.flush()


def receive(stream: BufferedIOBase) -> list[bytes]:
    """Reads a message. Raises EOFError if the other side has closed the stream."""
    (number,) = struct.unpack("<I", _read(stream, 4))
    lengths = struct.unpack(f"<{number}I", _read(stream, 4 * number))
    content = _read(stream, sum(lengths))
    return [content[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _read(stream: BufferedIOBase, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content
