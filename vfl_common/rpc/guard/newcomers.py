"""Keeps room for the parties' connections when strangers open many.

gRPC accepts a limited number of connections, and closes one without a handshake after five seconds.
So a hundred connections per second can use up a thousand files, and each slows down every poll. If
there are more than a few connections without a call, this closes those that have had time for one,
the oldest first: a call needs a certificate of the federation. It works only on Linux, because gRPC
does not share its sockets, and they are found in /proc.
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

# How often to count the connections.
_LOOK_S = 0.1
# How often to examine each connection, unless many are new, because this takes time for each.
_WHO_S = 0.5
# The count of strangers, besides all parties, for whom gRPC's own deadline is enough.
_FEW = 64
# The time from a party's connection to its first call: some round trips on a busy machine.
_CALL_S = 2.0
# The time for a silent connection if there are many strangers.
_MIN_CALL_S = 0.5
# The time between two warnings.
_WARN_S = 60.0

log = logging.getLogger(__name__)


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Watches the connections to one port while the block runs.

    Args:
        max_connections: the connections that gRPC accepts at once.
        streams: the connections that the parties may open.
    """

    def __init__(self, max_connections: int, streams: int) -> None:
        self._max_connections, self._few = max_connections, streams + _FEW
        self._port = 0
        self._lock = threading.Lock()
        # The endpoints that have called.
        self._known: set[Endpoint] = set()
        # {socket: its other end}, in the order in which they were opened.
        self._seen: dict[str, Endpoint | None] = {}
        # {socket: when it was first seen}
        self._since_s: dict[str, float] = {}
        self._closed: set[str] = set()
        self._warnings = Rate(_WARN_S, 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)

    def watch(self, port: int) -> Self:
        """Sets the port to watch; the ``with`` block begins the watch."""
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
        """Wraps a method to note its callers, because gRPC names the caller only to the method."""
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
            peer = endpoint(context.peer())
            if peer is not None:
                with self._lock:
                    self._known.add(peer)
            return serve(request, context)

        return serving

    def _watch(self) -> None:
        looked_s, then = 0.0, 0
        while not self._over.wait(_LOOK_S):
            try:
                now_s, files = time.monotonic(), len(open_files())
                few = files <= self._few and len(self._known) <= self._max_connections
                if not few and (files > then + _FEW or now_s - looked_s >= _WHO_S):
                    self._look(now_s)
                    looked_s, then = now_s, files
            except OSError:
                # Without /proc, or a free file to list it, only gRPC's own deadline remains.
                continue

    def _look(self, now_s: float) -> None:
        """Closes connections of strangers that have had time for a call, and the oldest ones beyond
        three quarters of the room that the parties leave.
        """
        with self._lock:
            # Copied first, because a caller that comes later may not be among the sockets.
            called = self._known.copy()
        sockets = dict(open_sockets())
        for name in self._seen.keys() - sockets.keys():
            del self._seen[name], self._since_s[name]
        self._closed &= sockets.keys()
        for name, fd in sockets.items():
            if name not in self._seen:
                self._seen[name], self._since_s[name] = self._caller(fd), now_s
        with self._lock:
            # Forgets callers that have gone.
            self._known -= called.difference(self._seen.values())
            known = self._known.copy()
        callers = [
            name
            for name, peer in self._seen.items()
            if peer is not None and name not in self._closed
        ]
        strangers = [name for name in callers if self._seen[name] not in known]
        room = 3 * (self._max_connections - len(callers) + len(strangers)) // 4
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
            log.warning(
                "%d connections are open without a certificate; the oldest are closed to keep room",
                len(strangers),
                extra={"event": "strangers"},
            )

    @staticmethod
    def _is_late(fd: int, age_s: float, silent_s: float) -> bool:
        """Returns whether a stranger has had its time. A connection that has begun its handshake,
        as that of a distant party, gets the whole time.
        """
        if not silent_s <= age_s < _CALL_S:
            return age_s >= _CALL_S
        try:
            with duplicate(fd) as copy:
                counts = counts_of(copy)
        except OSError:
            # The connection was closed meanwhile.
            return False
        return counts is not None and counts[1] == 0

    def _caller(self, fd: int) -> Endpoint | None:
        """Returns the other end of a connection to the port; None for any other socket. Raises
        OSError.
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
        # The socket was closed meanwhile, or it listens.
        return None

    def _close(self, name: str, fd: int) -> bool:
        """Ends a connection through a duplicate of its socket, because gRPC may close its own at
        any moment, and the descriptor's number be reused.
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
    """Returns how long a caller may be silent: less if there are many more strangers than ``few``.

    Each open connection slows down every poll.
    """
    share = few / max(few, strangers)
    return max(_MIN_CALL_S, _CALL_S * share**2)
