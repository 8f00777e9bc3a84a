"""Makes room for callers whom a listening process does not know yet, when strangers take it up.

gRPC accepts a bounded number of connections, and closes one without a handshake after five seconds.
So a hundred a second can take up a thousand files; and each that is held slows down every poll. Of
more than a few connections on which no call has come, this closes those that have had time for one,
the oldest first: a call needs a certificate of the federation. Linux only, as gRPC shares no
sockets: they are found in /proc.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from vfl_common.rpc.counters.tcp import (
    Endpoint,
    counts_of,
    duplicate,
    endpoint,
    open_files,
    open_sockets,
    plain,
)
from vfl_common.rpc.guard.rate import Rate

# At how many there are.
_LOOK_S = 0.1
# At who they are, unless many have come: each look takes the interpreter once for each of them.
_WHO_S = 0.5
# Strangers for whom gRPC's own deadline will do, beside the parties if all come at once.
_FEW = 64
# From its connection to a party's first call: some round trips, and perhaps a busy machine.
_CALL_S = 2.0
# If there are many strangers, for one that says nothing.
_LEAST_CALL_S = 0.5
# Between two warnings.
_TELL_S = 60.0

log = logging.getLogger(__name__)


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Watches the connections to one port while the block runs.

    Args:
        most: as many connections as gRPC accepts at once.
        streams: as many connections as the parties may open.
    """

    def __init__(self, most: int, streams: int) -> None:
        self._most, self._few = most, streams + _FEW
        self._port = 0
        self._lock = threading.Lock()
        # Who has called.
        self._known: set[Endpoint] = set()
        # {socket: who is at its other end}, in the order of coming.
        self._seen: dict[str, Endpoint | None] = {}
        # {socket: when it was seen first}.
        self._since_s: dict[str, float] = {}
        self._closed: set[str] = set()
        self._warnings = Rate(_TELL_S, 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)

    def watch(self, port: int) -> Self:
        """Begins, when the port is known."""
        self._port = port
        return self

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Notes who calls: gRPC names the caller only to the method itself."""
        handler = continuation(details)
        if handler is None:
            return None
        # All methods are streams: see ``channel.stream_handler``.
        return grpc.stream_stream_rpc_method_handler(
            self._noting(handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _noting(
        self, serve: Callable[[Any, grpc.ServicerContext], Any]
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        def serving(request: Any, context: grpc.ServicerContext) -> Any:
            found = endpoint(context.peer())
            if found is not None:
                with self._lock:
                    self._known.add(found)
            return serve(request, context)

        return serving

    def _watch(self) -> None:
        looked_s, then = 0.0, 0
        while not self._over.wait(_LOOK_S):
            try:
                now_s, files = time.monotonic(), len(open_files())
                few = files <= self._few and len(self._known) <= self._most
                if not few and (files > then + _FEW or now_s - looked_s >= _WHO_S):
                    self._look(now_s)
                    looked_s, then = now_s, files
            except OSError:
                # No /proc, or no file is free to list it: gRPC's own deadline remains.
                continue

    def _look(self, now_s: float) -> None:
        """Closes strangers who have had time to call, and the oldest beyond three quarters of the
        others' room.
        """
        with self._lock:
            # Before the look: who calls during it may not be among the sockets.
            called = self._known.copy()
        sockets = dict(open_sockets())
        for name in self._seen.keys() - sockets.keys():
            del self._seen[name], self._since_s[name]
        self._closed &= sockets.keys()
        for name, fd in sockets.items():
            if name not in self._seen:
                self._seen[name], self._since_s[name] = self._caller(fd), now_s
        with self._lock:
            # They have gone.
            self._known -= called.difference(self._seen.values())
            known = self._known.copy()
        callers = [
            name
            for name, each in self._seen.items()
            if each is not None and name not in self._closed
        ]
        strangers = [name for name in callers if self._seen[name] not in known]
        room = 3 * (self._most - len(callers) + len(strangers)) // 4
        beyond = strangers[: max(0, len(strangers) - self._few)]
        silent_s = patience_s(len(strangers), self._few)
        late = [
            name
            for name in beyond
            if self._is_late(sockets[name], now_s - self._since_s[name], silent_s)
        ]
        unwanted = dict.fromkeys((*strangers[: max(0, len(strangers) - room)], *late))
        ended = [name for name in unwanted if self._close(name, sockets[name])]
        self._closed.update(ended)
        held = self._warnings.passes("", now_s) if ended else None
        if held is not None:
            text = (
                "%d connections without a certificate take up room; the oldest of them are "
                "closed now and then"
            )
            log.warning(text, len(strangers), extra={"event": "strangers"})

    @staticmethod
    def _is_late(fd: int, age_s: float, silent_s: float) -> bool:
        """Whether a stranger has had its time. A party far away has begun its handshake at once,
        and has all of it.
        """
        if not silent_s <= age_s < _CALL_S:
            return age_s >= _CALL_S
        try:
            with duplicate(fd) as copy:
                counts = counts_of(copy)
        except OSError:
            # It was closed meanwhile.
            return False
        return counts is not None and counts[1] == 0

    def _caller(self, fd: int) -> Endpoint | None:
        """Returns the other end of a connection to the port; None if the socket is something else.
        Raises OSError.
        """
        try:
            with duplicate(fd) as copy:
                if (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and plain(copy.getsockname())[1] == self._port
                ):
                    return plain(copy.getpeername())
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
        # It was closed meanwhile, or it listens.
        return None

    def _close(self, name: str, fd: int) -> bool:
        """Ends a connection, through a duplicate: gRPC may close its own this moment, and the
        number change hands.
        """
        try:
            with duplicate(fd) as copy:
                if self._seen[name] == plain(copy.getpeername()):
                    copy.shutdown(socket.SHUT_RDWR)
                    return True
        except OSError:
            pass
        return False


def patience_s(strangers: int, few: int) -> float:
    """Returns how long a caller may say nothing: the shorter, the more there are beyond a ``few``.

    Each connection that is held slows down every poll.
    """
    share = few / max(few, strangers)
    return max(_LEAST_CALL_S, _CALL_S * share**2)
