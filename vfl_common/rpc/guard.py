"""Protects a listening process from harmful callers: limits its open files, keeps room for the
parties' connections when strangers open many, and logs refused callers at a limited rate.

gRPC accepts a limited number of connections, and closes a connection without a handshake after five
seconds. So a hundred connections per second can use up hundreds of files, and each open connection
slows down every poll. A call needs a certificate of the federation. So if there are many
connections without a call, ``Door`` closes those that have had enough time for a call, the oldest
first. It works only on Linux, because gRPC does not give access to its sockets, which are found in
/proc.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from vfl_common.errors import Code, VflError
from vfl_common.process.logs import Rate, append_held_count
from vfl_common.rpc.counters import (
    Endpoint,
    duplicate_socket,
    list_descriptors,
    normalise_address,
    parse_endpoint,
    read_counts,
    yield_sockets,
)
from vfl_common.text import LINE, clean

# The time between two counts of the open files.
_LOOK_S = 0.1
# The time between two examinations of all connections, which are slower than a count. Many new
# connections are examined at once.
_WHO_S = 0.5
# The number of strangers for which gRPC's own deadline is enough.
_FEW = 64
# The maximum time from a party's connection to its first call: some round trips on a busy machine.
_CALL_S = 2.0
# The minimum time that a silent connection gets if there are many strangers.
_MIN_CALL_S = 0.5
# The time between two warnings.
_WARN_S = 60.0

log = logging.getLogger(__name__)


class Door(grpc.ServerInterceptor):  # type: ignore[misc]
    """Watches the connections to one port while the block runs.

    Args:
        max_connections: The maximum number of connections that gRPC accepts at once.
        streams: The maximum number of connections that the parties may open.
    """

    def __init__(self, max_connections: int, streams: int) -> None:
        self._max_connections, self._max_strangers = max_connections, streams + _FEW
        self._port = 0
        self._lock = threading.Lock()
        # The remote endpoints that have made a call.
        self._callers: set[Endpoint] = set()
        # {socket: its remote endpoint}, in the order in which the sockets were opened.
        self._endpoints: dict[str, Endpoint | None] = {}
        # {socket: the time at which it was first seen}
        self._since_s: dict[str, float] = {}
        self._closed: set[str] = set()
        self._warnings = Rate(_WARN_S, 1)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)

    def watch(self, port: int) -> Self:
        """Sets the port to watch. Watching begins with the ``with`` block."""
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
        self._stop.set()
        self._thread.join()

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Wraps a gRPC method so that its callers are recorded, because only the method gets the
        caller's address.
        """
        handler = continuation(details)
        if handler is None:
            return None
        # All methods are streams: see ``channel.stream_handler``.
        return grpc.stream_stream_rpc_method_handler(
            self._record_callers(handler.stream_stream),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _record_callers(
        self, serve: Callable[[Any, grpc.ServicerContext], Any]
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        def serve_and_record(request: Any, context: grpc.ServicerContext) -> Any:
            peer = parse_endpoint(context.peer())
            if peer is not None:
                with self._lock:
                    self._callers.add(peer)
            return serve(request, context)

        return serve_and_record

    def _watch(self) -> None:
        last_examined_s, last_num_files = 0.0, 0
        while not self._stop.wait(_LOOK_S):
            try:
                now_s, num_files = time.monotonic(), len(list_descriptors())
                is_quiet = (
                    num_files <= self._max_strangers and len(self._callers) <= self._max_connections
                )
                if not is_quiet and (
                    num_files > last_num_files + _FEW or now_s - last_examined_s >= _WHO_S
                ):
                    self._close_strangers(now_s)
                    last_examined_s, last_num_files = now_s, num_files
            except OSError:
                # Without /proc, or without a free file to list it, only gRPC's own deadline
                # applies.
                continue

    def _close_strangers(self, now_s: float) -> None:
        """Closes the connections of strangers that have had enough time for a call. Also closes the
        oldest connections of strangers if they take more than three quarters of the room that the
        parties leave.
        """
        with self._lock:
            # The set is copied before the sockets are listed, because a caller that comes in
            # between may not be among the sockets.
            previous_callers = self._callers.copy()
        sockets = dict(yield_sockets())
        for name in self._endpoints.keys() - sockets.keys():
            del self._endpoints[name], self._since_s[name]
        self._closed &= sockets.keys()
        for name, fd in sockets.items():
            if name not in self._endpoints:
                self._endpoints[name], self._since_s[name] = self._find_endpoint(fd), now_s
        with self._lock:
            # Forgets callers that have gone.
            self._callers -= previous_callers.difference(self._endpoints.values())
            current_callers = self._callers.copy()
        callers = [
            name
            for name, peer in self._endpoints.items()
            if peer is not None and name not in self._closed
        ]
        strangers = [name for name in callers if self._endpoints[name] not in current_callers]
        room = 3 * (self._max_connections - len(callers) + len(strangers)) // 4
        excess = strangers[: max(0, len(strangers) - self._max_strangers)]
        silent_s = compute_patience_s(len(strangers), self._max_strangers)
        late = [
            name
            for name in excess
            if self._is_late(sockets[name], now_s - self._since_s[name], silent_s)
        ]
        to_close = dict.fromkeys((*strangers[: max(0, len(strangers) - room)], *late))
        closed = [name for name in to_close if self._close_connection(name, sockets[name])]
        self._closed.update(closed)
        num_held_back = self._warnings.passes("", now_s) if closed else None
        if num_held_back is not None:
            log.warning(
                "%d connections are open without a certificate; the oldest are closed to keep room",
                len(strangers),
                extra={"event": "strangers"},
            )

    @staticmethod
    def _is_late(fd: int, age_s: float, silent_s: float) -> bool:
        """Returns whether a stranger has had enough time for a call. A connection that has begun
        its handshake gets more time, because it may be that of a distant party.
        """
        if not silent_s <= age_s < _CALL_S:
            return age_s >= _CALL_S
        try:
            with duplicate_socket(fd) as copy:
                counts = read_counts(copy)
        except OSError:
            # The connection was closed meanwhile.
            return False
        return counts is not None and counts[1] == 0

    def _find_endpoint(self, fd: int) -> Endpoint | None:
        """Returns the remote endpoint of a connection to the port; None for any other socket.
        Raises OSError.
        """
        try:
            with duplicate_socket(fd) as copy:
                if (
                    copy.family in (socket.AF_INET, socket.AF_INET6)
                    and normalise_address(copy.getsockname())[1] == self._port
                ):
                    return normalise_address(copy.getpeername())
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise
        # The socket was closed meanwhile, or is a listening socket.
        return None

    def _close_connection(self, name: str, fd: int) -> bool:
        """Closes a connection through a duplicate of its socket. Returns whether it was closed.
        gRPC may close its own socket at any moment, and the descriptor may then be reused.
        """
        try:
            with duplicate_socket(fd) as copy:
                if self._endpoints[name] == normalise_address(copy.getpeername()):
                    copy.shutdown(socket.SHUT_RDWR)
                    return True
        except OSError:
            pass
        return False


def compute_patience_s(strangers: int, few: int) -> float:
    """Returns how long a caller may be silent: the more strangers beyond ``few``, the shorter.

    Each open connection slows down every poll.
    """
    share = few / max(few, strangers)
    return max(_MIN_CALL_S, _CALL_S * share**2)


# The maximum number of connections of strangers. More connections would slow down every poll.
_MAX_STRANGERS = 1000
# The number of the option M_ARENA_MAX in malloc.h.
_M_ARENA_MAX = -8


def share_arenas() -> None:
    """Limits glibc to two memory arenas for all threads, because gRPC starts threads for strangers'
    calls and each arena keeps memory.

    Call it before threads start. A setting in the environment (``MALLOC_ARENA_MAX``) takes
    precedence.
    """
    if platform.libc_ver()[0] == "glibc" and "MALLOC_ARENA_MAX" not in os.environ:
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


def compute_connection_limit(streams: int, files: int) -> int:
    """Returns the maximum number of connections to accept at once. Each of the parties' ``streams``
    may need a connection.

    At least half of the ``files`` remain for the process itself.
    """
    return min(streams + _MAX_STRANGERS, files // 2)


# The time between two log lines about one caller, after the first ``_AT_ONCE`` lines.
_EVERY_S = 10.0
_AT_ONCE = 5


class Refusals:
    """Records the refusals of one service. ``show``: called for each logged refusal, to report it
    to a person.
    """

    def __init__(self, show: Callable[..., None] = lambda _event, **_facts: None) -> None:
        self._show = show
        self._rate = Rate(_EVERY_S, _AT_ONCE)
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def note(self, party: str, error: BaseException) -> None:
        """Counts and logs a refusal. ``party``: the name in the caller's certificate; '' if it has
        none.
        """
        code = error.code if isinstance(error, VflError) else Code.INTERNAL
        with self._lock:
            self._counts[code.name] += 1
        held = self._rate.passes(party, time.monotonic())
        if held is None:
            return
        text = append_held_count(f"refused {party or 'a caller without a name'}: {error}", held)
        log.warning(
            text, extra={"event": "refused", "party": party, "code": code.name, "more": held}
        )
        self._show(
            "refused",
            party=party,
            code=code.name,
            why=clean(append_held_count(str(error), held), LINE),
        )

    def counts(self) -> Counter[str]:
        """Returns {error code: number of refusals}."""
        with self._lock:
            return self._counts.copy()
