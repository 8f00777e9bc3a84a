"""Runs the application on its port, in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.rpc.channel import check_address, split_address
from vfl_party.serve.http.patient import Patient

# Connections and requests under way; further ones get 503.
_MOST_AT_ONCE = 1_000
_CLOSE_S = 10


@contextmanager
def listening(app: ASGIApp, settings: ServeSettings) -> Iterator[str]:
    """Serves ``app`` while the block runs; yields its URL. Raises InputError."""
    check_address(settings.http)
    host, port = split_address(settings.http)
    secure = settings.certificate is not None
    config = uvicorn.Config(
        app,
        http=Patient,
        ws="none",
        access_log=False,
        log_level="warning",
        log_config=None,
        lifespan="off",
        server_header=False,
        # Nobody here asks for the caller's address.
        proxy_headers=False,
        interface="asgi3",
        limit_concurrency=_MOST_AT_ONCE,
        timeout_graceful_shutdown=_CLOSE_S,
        h11_max_incomplete_event_size=16 << 10,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
    )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off the wait for more to send only if the socket says that it is TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    # From now on callers wait, if the server is not up yet.
    bound.listen(_MOST_AT_ONCE)
    server = uvicorn.Server(config)
    try:
        config.load()
    except (OSError, ValueError) as error:
        text = f"serve.certificate: {settings.certificate} and serve.key cannot be used ({error})"
        raise InputError(Code.CERTIFICATE_INVALID, text) from None
    thread = threading.Thread(target=server.run, args=([bound],), name="http", daemon=True)
    thread.start()
    address = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if secure else 'http'}://{address}:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=2 * _CLOSE_S)
        bound.close()
