"""Byte streams between a node and the hub: connections through proxies, HTTP requests, tunnels.

A tunnel carries the TLS connection of two programs of a run, so neither the hub nor a node reads
it. It begins as an HTTP request with the header ``Upgrade``, which gateways pass on, and has no
frames. The kernel copies the bytes of a plain tunnel (``splice``).
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import select
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cryptography import x509

from vfl_common.errors import Code, LostError, PeerError
from vfl_common.identity.pem import compute_pin
from vfl_common.text import clean, host_and_port

MAX_HEAD, MAX_ANSWER = 16_384, 64 * 2**20
_BLOCK = 2**18
# Seconds after which an idle connection ends, and for the last bytes of an ended one.
_IDLE_S, _LAST_S = 600.0, 30.0
_PIPE_BYTES, _SET_PIPE_SIZE = 2**20, 1031
_CONNECT_S = 10.0
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: vfl-tunnel\r\n\r\n"


@dataclass(frozen=True)
class HubAddress:
    """How a node reaches the hub.

    Args:
        url: The hub's URL, ``https://host:port``.
        name: The name in the hub's certificate; '' if a gateway with a public certificate ends TLS
            in front of the hub.
        ca: The file of the federation's CA.
        proxy: The URL of an HTTP proxy, ``http://user:password@host:port``, or ''.
        plain_tunnels: Whether tunnels begin without TLS, because their contents are encrypted.
        pin: The pin of the hub's key, or '' if a gateway ends TLS.
    """

    url: str
    name: str
    ca: Path
    proxy: str = ""
    plain_tunnels: bool = True
    pin: str = ""

    def dial(self, *, tunnel: bool = False, timeout_s: float = _CONNECT_S) -> socket.socket:
        """Connects to the hub. Raises OSError."""
        target = urlsplit(self.url)
        host, port = target.hostname or "", target.port or 443
        sock = _connect(host, port, self.proxy, timeout_s)
        if target.scheme == "http" or (tunnel and self.plain_tunnels):
            return sock
        context = ssl.create_default_context(cafile=str(self.ca) if self.name else None)
        try:
            encrypted = context.wrap_socket(sock, server_hostname=self.name or host)
        except OSError:
            sock.close()
            raise
        content = encrypted.getpeercert(binary_form=True) or b""
        if self.pin and compute_pin(x509.load_der_x509_certificate(content)) != self.pin:
            encrypted.close()
            raise ConnectionRefusedError("the hub has another key than that of the invitation")
        return encrypted

    def open_tunnel(self, path: str, token: str, timeout_s: float) -> socket.socket:
        """Opens a tunnel. Raises OSError if the hub refuses it or cannot be reached."""
        return _switch(self.dial(tunnel=True), urlsplit(self.url).netloc, path, token, timeout_s)


def open_direct(address: str, path: str, timeout_s: float) -> socket.socket:
    """Opens a tunnel to another member's node without the hub. Raises OSError."""
    sock = _connect(*host_and_port(address), "", timeout_s)
    return _switch(sock, address, path, "", timeout_s)


def _switch(
    sock: socket.socket, host: str, path: str, token: str, timeout_s: float
) -> socket.socket:
    """Makes a connection a tunnel, and returns it. Raises OSError if the peer refuses."""
    try:
        head = (
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\n"
            f"Connection: Upgrade\r\nUpgrade: vfl-tunnel\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        sock.sendall(head.encode())
        sock.settimeout(timeout_s)
        answer = read_head(sock)
        if b" 101 " not in answer.split(b"\r\n", 1)[0]:
            raise ConnectionRefusedError(clean(answer.split(b"\r\n", 1)[0].decode("latin-1")))
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


class Client:
    """Sends JSON requests to the hub over one connection. Only one thread may use it."""

    def __init__(self, address: HubAddress) -> None:
        self._address = address
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, path: str, value: Any, *, token: str = "", timeout_s: float = 30.0) -> Any:
        """Sends a request, and returns the answer.

        Raises PeerError (REFUSED) with the hub's words if it refuses the request, and LostError
        (PARTY_LOST) if the hub does not answer or cannot work now.
        """
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection("hub")
                self._connection.sock = self._address.dial()
            self._connection.sock.settimeout(timeout_s)
            self._connection.request("POST", path, json.dumps(value), headers)
            response = self._connection.getresponse()
            content = response.read(MAX_ANSWER)
            answer = json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise LostError(
                Code.PARTY_LOST, f"{self._address.url}: the hub does not answer ({error})."
            ) from None
        if response.status != 200:
            detail = answer.get("detail") if isinstance(answer, dict) else None
            if response.status == 503:
                raise LostError(Code.PARTY_LOST, f"hub: {clean(str(detail))}")
            raise PeerError(Code.REFUSED, f"hub: {clean(str(detail))}")
        return answer

    def close(self) -> None:
        """Closes the connection. The next request makes another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _connect(host: str, port: int, proxy: str, timeout_s: float) -> socket.socket:
    if not proxy:
        sock = socket.create_connection((host, port), timeout_s)
    else:
        through = urlsplit(proxy)
        sock = socket.create_connection((through.hostname, through.port or 3128), timeout_s)
        head = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n"
        if through.username is not None:
            user = f"{unquote(through.username)}:{unquote(through.password or '')}"
            head += f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n"
        try:
            sock.sendall(f"{head}\r\n".encode())
            status = read_head(sock).split(b"\r\n", 1)[0]
            if b" 200" not in status:
                raise ConnectionRefusedError(
                    f"the proxy refused: {clean(status.decode('latin-1'))}"
                )
        except BaseException:
            sock.close()
            raise
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


def read_head(sock: socket.socket) -> bytes:
    """Reads the head of an HTTP message and nothing behind it. Raises OSError if there is none.

    One byte is read at a time, so that the kernel can copy the bytes behind the head.
    """
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte or len(head) >= MAX_HEAD:
            raise ConnectionError("the peer sent no HTTP message")
        head += byte
    return bytes(head)


def join_streams(first: socket.socket, second: socket.socket) -> None:
    """Copies bytes between two connections in both directions until both have ended."""
    try:
        if isinstance(first, ssl.SSLSocket) or isinstance(second, ssl.SSLSocket):
            _copy(first, second)
        else:
            back = threading.Thread(target=_splice, args=(second, first), daemon=True)
            back.start()
            _splice(first, second)
            back.join()
    finally:
        first.close()
        second.close()


def _copy(first: socket.socket, second: socket.socket) -> None:
    """Copies in one thread, because two threads must not use one TLS connection. Ends if either
    connection ends, and then sends what it has read.
    """
    waiting = {first: bytearray(), second: bytearray()}
    is_open = True
    for sock in waiting:
        sock.setblocking(False)
    while is_open or any(waiting.values()):
        progress = False
        for source, target in ((first, second), (second, first)):
            try:
                if is_open and len(waiting[target]) < _BLOCK:
                    block = source.recv(_BLOCK)
                    is_open, progress = bool(block), True
                    waiting[target] += block
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                pass
            except OSError:
                is_open = False
            try:
                if waiting[target]:
                    del waiting[target][: target.send(waiting[target])]
                    progress = True
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                pass
            except OSError:
                return
        if not progress:
            poller = select.poll()
            for source, target in ((first, second), (second, first)):
                is_room = is_open and len(waiting[target]) < _BLOCK
                poller.register(
                    source,
                    (select.POLLIN if is_room else 0) | (select.POLLOUT if waiting[source] else 0),
                )
            events = poller.poll(1000.0 * (_IDLE_S if is_open else _LAST_S))
            lost = select.POLLHUP | select.POLLERR | select.POLLNVAL
            if not events or any(event & lost and not event & select.POLLIN for _, event in events):
                return


def _splice(source: socket.socket, target: socket.socket) -> None:
    reading, writing = os.pipe()
    try:
        with contextlib.suppress(OSError, AttributeError):
            import fcntl

            fcntl.fcntl(writing, _SET_PIPE_SIZE, _PIPE_BYTES)
        while size := os.splice(source.fileno(), writing, _PIPE_BYTES):
            while size:
                size -= os.splice(reading, target.fileno(), size)
    except OSError:
        pass
    finally:
        os.close(reading)
        os.close(writing)
    for sock, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)
