"""Runs the application on its port, in a separate thread."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.http_limits import Patient
from vfl_common.rpc.channel import check_address, split_address

# Maximum number of connections and of current requests; further ones get status 503.
_MAX_CONNECTIONS = 1_000
_CLOSE_S = 10
# Seconds for callers to close their connections, and between two checks.
_LEAVE_S, _POLL_S = 2.0, 0.02


class HttpPort:
    """The running HTTP port. ``url``: its address; ``socket``: its listening socket.

    ``server``: the server of uvicorn. ``leaving``: set once another process takes over.
    """

    def __init__(
        self, url: str, bound: socket.socket, server: uvicorn.Server, leaving: threading.Event
    ) -> None:
        self.url, self.socket = url, bound
        self._server, self._leaving = server, leaving

    def leave(self) -> None:
        """Stops accepting connections; new ones wait in the socket for the next process.

        Existing connections close with the answer to their next request.
        """
        self._leaving.set()
        for server in self._server.servers:
            server.get_loop().call_soon_threadsafe(server.close)
        until_s = time.monotonic() + _LEAVE_S
        while self._server.server_state.connections and time.monotonic() < until_s:
            time.sleep(_POLL_S)


@contextmanager
def listening(
    app: ASGIApp, settings: ServeSettings, inherited: socket.socket | None = None
) -> Iterator[HttpPort]:
    """Serves ``app`` while the block runs. Raises InputError.

    ``inherited``: the listening socket of the process that this one replaces.
    """
    host, _ = split_address(settings.http)
    secure = settings.certificate is not None
    require_certificate(settings)
    bound, leaving = _bind(settings.http, inherited), threading.Event()
    config = uvicorn.Config(
        _close_when_leaving(app, leaving),
        http=Patient,
        ws="none",
        access_log=False,
        log_level="warning",
        log_config=None,
        lifespan="off",
        server_header=False,
        # No code here uses the caller's address.
        proxy_headers=False,
        interface="asgi3",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_S,
        h11_max_incomplete_event_size=16 << 10,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],), name="http", daemon=True)
    thread.start()
    address = f"[{host}]" if ":" in host else host
    try:
        url = f"{'https' if secure else 'http'}://{address}:{bound.getsockname()[1]}"
        yield HttpPort(url, bound, server, leaving)
    finally:
        server.should_exit = True
        thread.join(timeout=2 * _CLOSE_S)
        bound.close()


def require_certificate(settings: ServeSettings) -> None:
    """Raises InputError if the certificate and key of HTTPS cannot be used."""
    if settings.certificate is None or settings.key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key)
    except (OSError, ValueError) as error:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"serve.certificate, serve.key: cannot use {settings.certificate} and {settings.key} "
            f"({error}). Give a PEM certificate and its key.",
        ) from None


def _bind(address: str, inherited: socket.socket | None) -> socket.socket:
    """Returns a listening socket: the inherited one, unless the address has changed. Raises
    InputError.
    """
    host, port = split_address(address)
    if inherited is not None:
        if port in (0, inherited.getsockname()[1]):
            return inherited
        inherited.close()
    check_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    # From here on, connections wait in the socket until the server has started.
    bound.listen(_MAX_CONNECTIONS)
    return bound


def _close_when_leaving(app: ASGIApp, leaving: threading.Event) -> ASGIApp:
    """Wraps the application so that its answers close connections once ``leaving`` is set."""

    async def app_closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def relay(message: Message) -> None:
            if leaving.is_set() and message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, relay)

    return app_closing
