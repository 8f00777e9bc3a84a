"""Worker processes: they compute for one program of ours on other cores, and end with it.

A program of ours has threads of gRPC and torch, so it is never forked. Each worker is a new one,
``python -m MODULE``. Its standard input is one end of a socket, on which it reads messages and
answers each. A message is a list of parts: their number and their lengths, 4 bytes each,
little-endian, then the parts. The first message has no answer: it is for secrets, which are in no
argument and no variable, where others could read them.

A worker that is killed is replaced, and its request asked once more: each answer follows from the
first message and the request alone. A worker ends when the other end is closed, after the request
in hand: so it does not outlive its parent, however that ends. SIGINT and SIGTERM, which a terminal
or systemd sends to all processes of a program, are the parent's affair.
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
# Answers a request.
Answer = Callable[[list[bytes]], Sequence[bytes]]


class Workers:
    """Worker processes, from ``with`` until its end; any thread may call.

    ``submit`` returns at once. Each worker has one request at a time; the others wait in memory, as
    their results do, so the caller bounds how many are under way: ``2 * count`` keep all busy.

    Args:
        module: the program of each, which calls ``work``.
        count: how many processes.
        task: what they do, as in "which masked ids", for the error of one that ends.
        first: the parts of the first message.
        file: a file descriptor that they inherit; its number is their argument.
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
        self._all: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # One waits for each worker.
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
        """Ends the workers at once. Futures that are not done are cancelled or raise
        InternalError.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
            for each in self._all:
                each.process.kill()
        self._threads.shutdown()
        for each in self._all:
            each.process.wait()
            # What was not sent is lost.
            with suppress(OSError):
                each.stream.close()

    def submit(self, read: Callable[[list[bytes]], T], *request: bytes) -> Future[T]:
        """Sends a request to the next worker that has none. Returns what ``read`` makes of the
        answer.
        """
        return self._threads.submit(lambda: read(self._ask(request)))

    def _ask(self, request: Sequence[bytes]) -> list[bytes]:
        """Raises InternalError if two workers have ended over the request."""
        asked = self._idle.get()
        try:
            try:
                return asked.ask(request)
            except (OSError, EOFError):
                asked = self._instead_of(asked)
                return asked.ask(request)
        except (OSError, EOFError):
            text = f"{self._gone(asked)}; the lines above say why, unless it was killed"
            raise InternalError(text) from None
        finally:
            self._idle.put(asked)

    def _start(self) -> _Worker:
        """Raises InputError if the system has no room for another process."""
        try:
            started = _Worker(self._module, self._file)
        except OSError as error:
            text = f"cannot start another process on this machine ({error.strerror})"
            advice = 'end other programs, or set "threads = 1" in the party file'
            raise InputError(Code.CONFIG_INVALID, f"{text}; {advice}") from None
        self._all.append(started)
        # If it has ended already, its first request says so.
        with suppress(OSError):
            send(started.stream, *self._first)
        return started

    def _instead_of(self, gone: _Worker) -> _Worker:
        """Raises EOFError if all workers are being ended, InputError as ``_start``."""
        with self._lock:
            if self._ended:
                raise EOFError
            gone.process.kill()
            gone.process.wait()
            started = self._start()
            self._all.remove(gone)
            log.warning(
                "%s: another one takes its place", self._gone(gone), extra={"event": "replaced"}
            )
            return started

    def _gone(self, worker: _Worker) -> str:
        return f"process {worker.process.pid}, which {self._task}, has ended"


class _Worker:
    """A process, and the stream to it."""

    def __init__(self, module: str, file: int | None) -> None:
        ours, theirs = socket.socketpair()
        files = [] if file is None else [file]
        # The stream keeps ours open.
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, files)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=files,
                # Ctrl-C at the terminal is for this process to decide about.
                start_new_session=True,
            )
            self.stream: BufferedIOBase = ours.makefile("rwb")

    def ask(self, request: Sequence[bytes]) -> list[bytes]:
        """Raises OSError or EOFError if the process has ended."""
        send(self.stream, *request)
        return receive(self.stream)


def work(begin: Callable[[list[bytes]], Answer]) -> None:
    """Is the program of a worker. ``begin`` makes of the first message what answers the others."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as parent:
        serve(parent.makefile("rwb"), begin)


def serve(stream: BufferedIOBase, begin: Callable[[list[bytes]], Answer]) -> None:
    """Answers until the other side is gone."""
    try:
        answer = begin(receive(stream))
        while True:
            send(stream, *answer(receive(stream)))
    except (EOFError, ConnectionError):
        return


def send(stream: BufferedIOBase, *parts: bytes) -> None:
    """Writes a message. Raises OSError if the other side is gone."""
    stream.write(struct.pack(f"<{1 + len(parts)}I", len(parts), *map(len, parts)))
    stream.write(b"".join(parts))
    stream.flush()


def receive(stream: BufferedIOBase) -> list[bytes]:
    """Reads a message. Raises EOFError if the other side is gone."""
    (number,) = struct.unpack("<I", _read(stream, 4))
    lengths = struct.unpack(f"<{number}I", _read(stream, 4 * number))
    content = _read(stream, sum(lengths))
    return [content[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


def _read(stream: BufferedIOBase, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content
