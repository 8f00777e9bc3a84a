"""Masks batches on several cores. Masking holds Python's lock, so it needs processes, not threads.

A party's process has threads of gRPC and torch, so it is never forked. Each worker is a new program
(see ``worker``) that imports neither.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedIOBase
from queue import SimpleQueue
from typing import Self

from vfl_common.errors import Code, InternalError, PeerError
from vfl_party.psi import worker


class Masking:
    """Worker processes that mask with one secret, from ``with`` until its end; any thread may call.

    ``own`` and ``others`` return at once. Each worker has one batch at a time; the others wait in
    memory, as their results do, so the caller bounds how many are under way: ``2 * workers`` keep
    all busy.

    Args:
        secret: 32 random bytes.
        salt: what all parties hash their ids with.
        workers: how many processes.
    """

    def __init__(self, secret: bytes, salt: bytes, workers: int) -> None:
        self._secret, self._salt, self._workers = secret, salt, workers
        self._all: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # One waits for each worker.
        self._threads = ThreadPoolExecutor(workers, "masking")

    def __enter__(self) -> Self:
        for _ in range(self._workers):
            self._all.append(started := _Worker())
            # If it has ended already, its first batch says so.
            with suppress(OSError):
                worker.send(started.stream, self._secret, self._salt)
            self._idle.put(started)
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the workers at once. Futures that are not done are cancelled or raise
        InternalError.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        for each in self._all:
            each.process.kill()
        self._threads.shutdown()
        for each in self._all:
            each.process.wait()
            # What was not sent is lost.
            with suppress(OSError):
                each.stream.close()

    def own(self, ids: Sequence[str]) -> Future[bytes]:
        """Hashes and masks ids of this party; gives their points in the same order."""
        return self._threads.submit(self._ask, worker.OWN, *[each.encode() for each in ids])

    def others(self, points: bytes, party: str) -> Future[bytes]:
        """Checks points that the peer ``party`` has sent, and masks them; gives points in the same
        order.

        The future raises PeerError, as ``curve.check``.
        """
        return self._threads.submit(self._ask, worker.OTHERS, party.encode(), points)

    def _ask(self, *request: bytes) -> bytes:
        asked = self._idle.get()
        try:
            worker.send(asked.stream, *request)
            kind, *rest = worker.receive(asked.stream)
        except (OSError, EOFError):
            what = f"process {asked.process.pid}, which masked ids, has ended"
            raise InternalError(f"{what}; the lines above say why, unless it was killed") from None
        finally:
            self._idle.put(asked)
        if kind == worker.REFUSED:
            code, text, party = (each.decode() for each in rest)
            raise PeerError(Code(int(code)), text, party=party)
        return rest[0]


class _Worker:
    """A process, and the stream to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # The stream keeps ours open.
        with ours, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", worker.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Ctrl-C at the terminal is for this process to decide about.
                start_new_session=True,
            )
            self.stream: BufferedIOBase = ours.makefile("rwb")
