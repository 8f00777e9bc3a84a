"""The server's answers on their way from the thread that reads a session to the main thread."""

from __future__ import annotations

import queue
import threading

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.pb.vfl.v1 import control_pb2

# Bytes; a server that keeps to the protocol has a few hundred on the way.
MOST_UNREAD = 8 << 20
# Of an error, which has a short text.
_ERROR_BYTES = 1 << 10

Answer = control_pb2.ServerMessage | VflError


class Inbox:
    """A queue whose content is bounded, so that a server cannot fill this party's memory."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[Answer, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Bytes.
        self._unread = 0

    def put(self, answer: Answer) -> None:
        """Adds an answer."""
        size = _ERROR_BYTES if isinstance(answer, VflError) else answer.ByteSize()
        with self._lock:
            self._unread += size
        self._answers.put((answer, size))

    def get(self, timeout: float | None = None) -> Answer:
        """Waits for the oldest answer and takes it. Raises queue.Empty after ``timeout``
        seconds.
        """
        answer, size = self._answers.get(timeout=timeout)
        with self._lock:
            self._unread -= size
        return answer

    def empty(self) -> bool:
        """Whether all answers are taken."""
        return self._answers.empty()

    def require_room(self, server: str) -> None:
        """Raises PeerError, naming ``server``, if more than ``MOST_UNREAD`` bytes wait to be
        taken.
        """
        if self._unread > MOST_UNREAD:
            text = (
                f"{server} sends faster than this party reads: {MOST_UNREAD >> 20} MiB are unread"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=server)
