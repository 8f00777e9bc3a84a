"""Passes the server's answers from the thread that reads a session to the main thread."""

from __future__ import annotations

import queue
import threading

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.pb.vfl.v1 import control_pb2

# The maximum number of unread bytes. A server that follows the protocol causes a few hundred.
MAX_UNREAD = 8 << 20
# The size with which an error is counted, because its text is short.
_ERROR_BYTES = 1 << 10

Answer = control_pb2.ServerMessage | VflError


class Inbox:
    """A queue of answers with a limited size, so that a server cannot fill this party's memory."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[Answer, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # The bytes of the answers in the queue.
        self._unread_bytes = 0

    def put(self, answer: Answer) -> None:
        """Adds an answer to the queue."""
        size = _ERROR_BYTES if isinstance(answer, VflError) else answer.ByteSize()
        with self._lock:
            self._unread_bytes += size
        self._answers.put((answer, size))

    def get(self, timeout: float | None = None) -> Answer:
        """Waits for the oldest answer and removes it. Raises queue.Empty after ``timeout``
        seconds.
        """
        answer, size = self._answers.get(timeout=timeout)
        with self._lock:
            self._unread_bytes -= size
        return answer

    def empty(self) -> bool:
        """Returns whether the queue has no answers."""
        return self._answers.empty()

    def require_room(self, server: str) -> None:
        """Raises PeerError about ``server`` if more than ``MAX_UNREAD`` bytes are unread."""
        if self._unread_bytes > MAX_UNREAD:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{server} sends faster than this party reads: {MAX_UNREAD >> 20} MiB are unread",
                party=server,
            )
