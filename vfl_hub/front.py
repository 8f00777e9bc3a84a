"""The hub's port: it ends TLS, joins tunnels, and passes other HTTP requests to the application."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port
from vfl_hub.streams import SWITCHED, join_streams, read_head

log = logging.getLogger(__name__)
_HEAD_S, _LATE_S, _POLL_S, _TLS_HELLO = 10.0, 0.5, 0.02, b"\x16"
# The maximum numbers of connections, in all and from one address, and of tunnels of a member in a
# run. More are closed at once.
MAX_CONNECTIONS, MAX_PER_ADDRESS, MAX_TUNNELS = 4096, 512, 64
_ECHO_S, _ECHO_BLOCK = 30.0, 2**16
ECHO = "echo"
SERVER = "server"
REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
ABSENT = b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
PLAIN = b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class RunRoute:
    """The end points of the tunnels of a run.

    Args:
        parties: The parties that may open tunnels.
        active: The party that other parties may reach.
        port: The port of the run's server on this machine; None while it does not listen.
    """

    parties: frozenset[str]
    active: str
    port: int | None


@dataclass(eq=False)
class _Pending:
    """A tunnel whose other end the node of ``member`` has not opened yet."""

    run: str
    member: str
    arrived: Future[socket.socket] = field(default_factory=Future)
    reported: bool = False


class Tunnels:
    """Joins the two ends of each tunnel. Any thread may call it.

    Args:
        secret: The secret from which tokens are derived.
        find_route: Returns the route of a run, or None if the run does not go on.
        on_pending: Called if a node has to open the other end of a tunnel.
        wait_s: The seconds for which a tunnel waits for its other end.
    """

    def __init__(
        self,
        secret: bytes,
        find_route: Callable[[str], RunRoute | None],
        on_pending: Callable[[], None],
        wait_s: float = 15.0,
    ) -> None:
        self._secret, self._find_route, self._on_pending = secret, find_route, on_pending
        self._wait_s, self._lock = wait_s, threading.Lock()
        # {run and member: the number of tunnels}
        self._num_tunnels: Counter[tuple[str, str]] = Counter()
        self._pending: dict[str, _Pending] = {}

    def make_token(self, run: str, member: str) -> str:
        """Returns the token with which a member opens tunnels of a run."""
        return hmac.new(self._secret, f"{run}\n{member}".encode(), hashlib.sha256).hexdigest()

    def list_asked(self) -> set[str]:
        """Returns the members whose nodes have to open tunnels and were not asked yet."""
        with self._lock:
            return {one.member for one in self._pending.values() if not one.reported}

    def take_pending(self, member: str) -> list[dict[str, str]]:
        """Returns the tunnels that a member's node has to open and was not asked for yet."""
        with self._lock:
            chosen = {
                number: pending
                for number, pending in self._pending.items()
                if pending.member == member and not pending.reported
            }
            for pending in chosen.values():
                pending.reported = True
        return [{"tunnel": number, "run": pending.run} for number, pending in chosen.items()]

    def serve(self, path: str, token: str, sock: socket.socket) -> None:
        """Serves a request for a tunnel: ``/tunnel/dial/RUN/MEMBER/TARGET``,
        ``/tunnel/accept/NUMBER`` or ``/tunnel/echo/MEMBER``. Returns when the tunnel has ended.
        """
        _, _, kind, *rest = path.split("/")
        if kind == ECHO and len(rest) == 1 and self._is_echo_token(token, rest[0]):
            with self._count(ECHO, rest[0]) as is_allowed:
                _echo(sock) if is_allowed else _refuse(sock, REFUSED)
            return
        if kind == "accept" and len(rest) == 1:
            with self._lock:
                pending = self._pending.pop(rest[0], None)
            if pending is None or not self._is_valid(token, pending.run, pending.member):
                _refuse(sock, REFUSED)
            else:
                pending.arrived.set_result(sock)
            return
        if kind != "dial" or len(rest) != 3:
            _refuse(sock, REFUSED)
            return
        run, member, target = rest
        route = self._find_route(run)
        allowed = (
            route is not None and member in route.parties and self._is_valid(token, run, member)
        )
        if route is None or not allowed or target not in (SERVER, route.active):
            _refuse(sock, REFUSED)
            return
        with self._count(run, member) as is_allowed:
            other = None
            if is_allowed:
                is_server = target == SERVER
                other = self._reach_server(run) if is_server else self._reach_party(run, target)
            if other is None:
                _refuse(sock, ABSENT)
                return
            sock.sendall(SWITCHED)
            if target != SERVER:
                other.sendall(SWITCHED)
            join_streams(sock, other)

    @contextlib.contextmanager
    def _count(self, run: str, member: str) -> Iterator[bool]:
        """Counts a tunnel during the block. Yields whether the member may have another one."""
        with self._lock:
            self._num_tunnels[run, member] += 1
            is_allowed = self._num_tunnels[run, member] <= MAX_TUNNELS
        try:
            yield is_allowed
        finally:
            with self._lock:
                self._num_tunnels[run, member] -= 1
                if not self._num_tunnels[run, member]:
                    del self._num_tunnels[run, member]

    def make_echo_token(self, member: str, hours_ago: int = 0) -> str:
        """Returns the token with which a member measures its way to the hub, for an hour or two."""
        return self.make_token(f"{ECHO} {int(time.time() // 3600) - hours_ago}", member)

    def _is_echo_token(self, token: str, member: str) -> bool:
        tokens = (self.make_echo_token(member, hours_ago) for hours_ago in (0, 1))
        return any(hmac.compare_digest(token.encode(), one.encode()) for one in tokens)

    def _is_valid(self, token: str, run: str, member: str) -> bool:
        return hmac.compare_digest(token.encode(), self.make_token(run, member).encode())

    def _reach_server(self, run: str) -> socket.socket | None:
        """Waits for the server, which may just be starting: programs that are refused wait longer
        before they try again.
        """
        give_up_s = time.monotonic() + self._wait_s
        while (route := self._find_route(run)) is not None and route.port is None:
            if time.monotonic() > give_up_s:
                return None
            time.sleep(_POLL_S)
        if route is None or route.port is None:
            return None
        try:
            sock = socket.create_connection(("127.0.0.1", route.port), _HEAD_S)
        except OSError:
            return None
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def _reach_party(self, run: str, member: str) -> socket.socket | None:
        number, pending = secrets.token_hex(16), _Pending(run, member)
        with self._lock:
            self._pending[number] = pending
        self._on_pending()
        try:
            return pending.arrived.result(self._wait_s)
        except Late:
            with self._lock:
                waiting = self._pending.pop(number, None)
            # The other end may have arrived in the last moment.
            return pending.arrived.result(_HEAD_S) if waiting is None else None


class TunnelServer(Protocol):
    """Serves requests for tunnels; see ``Tunnels.serve``."""

    def serve(self, path: str, token: str, sock: socket.socket) -> None:
        """Serves a request for a tunnel. Returns when the tunnel has ended."""


class Front:
    """Listens at a port for requests for tunnels, and at the hub also for other requests.

    Args:
        listen: host:port.
        context: The server's TLS; None behind a gateway that ends TLS.
        application: The Unix socket of the application; None if only tunnels are served.
        tunnels: The tunnels of all runs.
    """

    def __init__(
        self,
        listen: str,
        context: ssl.SSLContext | None,
        application: Path | None,
        tunnels: TunnelServer,
    ) -> None:
        host, port = host_and_port(listen)
        self._context, self._application, self._tunnels = context, application, tunnels
        # A gateway has one address for all.
        self._is_behind_gateway = context is None and application is not None
        # {address: the number of its connections}
        self._num_connections: Counter[str] = Counter()
        # {connection that has not sent its request: the time at which it is closed}
        self._waiting: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            raise InputError(
                Code.ADDRESS_IN_USE,
                f"{listen}: cannot be listened on ({error.strerror}). Choose another address.",
            ) from None
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="front", daemon=True).start()
        threading.Thread(target=self._close_late, name="late", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, (address, *_) = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                # There may be no descriptor left.
                time.sleep(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock, address), daemon=True).start()
            except RuntimeError:
                # There are too many threads.
                self._slots.release()
                sock.close()
                time.sleep(0.1)

    def _close_late(self) -> None:
        """Closes connections that are slow to send a request: a byte now and then is not enough."""
        while self._socket.fileno() >= 0:
            time.sleep(_LATE_S)
            with self._lock:
                now_s = time.monotonic()
                for sock in [sock for sock, until in self._waiting.items() if until < now_s]:
                    _abort(sock)

    def _serve(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            self._num_connections[address] += 1
            is_flood = (
                not self._is_behind_gateway and self._num_connections[address] > MAX_PER_ADDRESS
            )
        try:
            if is_flood:
                sock.close()
            else:
                self._serve_one(sock)
        except (OSError, ValueError):
            sock.close()
        except Exception:
            log.exception("a connection failed")
            sock.close()
        finally:
            self._slots.release()
            with self._lock:
                self._num_connections[address] -= 1
                if not self._num_connections[address]:
                    del self._num_connections[address]

    def _serve_one(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.settimeout(_HEAD_S)
        # TLS takes over the socket object.
        watched = sock.dup()
        with self._lock:
            self._waiting[watched] = time.monotonic() + _HEAD_S
        try:
            sock, path, head, encrypted = self._read_request(sock)
        finally:
            with self._lock:
                del self._waiting[watched]
            watched.close()
        if path.startswith("/tunnel/"):
            sock.settimeout(None)
            self._tunnels.serve(path, _find_token(head.partition(b"\r\n")[2]), sock)
        elif not encrypted or self._application is None:
            _refuse(sock, PLAIN)
        else:
            inner = socket.socket(socket.AF_UNIX)
            inner.settimeout(_HEAD_S)
            inner.connect(str(self._application))
            inner.sendall(head)
            for end in (sock, inner):
                end.settimeout(None)
            join_streams(sock, inner)

    def _read_request(self, sock: socket.socket) -> tuple[socket.socket, str, bytes, bool]:
        """Returns the connection, the path and the head of its first request, and whether it is
        encrypted.
        """
        encrypted = self._context is None
        if self._context is not None and sock.recv(1, socket.MSG_PEEK) == _TLS_HELLO:
            sock, encrypted = self._context.wrap_socket(sock, server_side=True), True
        head = read_head(sock)
        line = head.partition(b"\r\n")[0]
        path = line.split(b" ")[1].decode("ascii") if line.count(b" ") == 2 else ""
        return sock, path, head, encrypted


def _abort(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _echo(sock: socket.socket) -> None:
    """Sends back the caller's bytes, with which it measures its way to the hub."""
    sock.settimeout(_ECHO_S)
    sock.sendall(SWITCHED)
    give_up_s = time.monotonic() + _ECHO_S
    while (block := sock.recv(_ECHO_BLOCK)) and time.monotonic() < give_up_s:
        sock.sendall(block)
    sock.close()


def _find_token(fields: bytes) -> str:
    for field_ in fields.split(b"\r\n"):
        name, _, value = field_.partition(b":")
        if name.strip().lower() == b"authorization":
            return value.strip().removeprefix(b"Bearer ").decode("latin-1")
    return ""


def _refuse(sock: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(answer)
    sock.close()
