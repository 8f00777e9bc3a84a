"""Runs a server for the Open Inference Protocol in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import grpc

from vfl_common.rpc.channel import check_address
from vfl_common.rpc.inference.service import InferenceBackend, InferenceService

# The maximum size of a request, as over HTTP.
_MAX_BYTES = 4 << 20
# The maximum number of concurrent calls, and of connections.
_MAX_AT_ONCE = 1_000
_CLOSE_S = 10.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _MAX_BYTES),
    # Answers are not limited, because an answer may be larger than its request.
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", _MAX_AT_ONCE),
    ("grpc.max_concurrent_streams", 100),
    # The time limit for a caller to begin HTTP/2, with or without TLS.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Idle connections are closed. Clients reconnect automatically.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # gRPC reads only little of a request ahead of the service.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # A compressed message may decompress to a thousand times its size.
    ("grpc.per_message_decompression", 0),
]
Bound = tuple[int, asyncio.AbstractEventLoop, asyncio.Event]


@contextmanager
def run_inference_server(
    model: InferenceBackend, address: str, secret: tuple[bytes, bytes] | None
) -> Iterator[str]:
    """Serves ``model`` while the block runs; yields the address with its real port.

    Args:
        address: The host:port; port 0 takes a free port.
        secret: The key and the certificate in PEM; None for a server without TLS.

    Raises InputError (ADDRESS_INVALID, ADDRESS_IN_USE).
    """
    check_address(address)
    bound: Future[Bound] = Future()
    server_task = _serve(InferenceService(model), address, secret, bound)
    thread = threading.Thread(
        target=asyncio.run, args=(server_task,), name="inference", daemon=True
    )
    thread.start()
    port, loop, stop = bound.result()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=2 * _CLOSE_S)


async def _serve(
    service: InferenceService,
    address: str,
    secret: tuple[bytes, bytes] | None,
    bound: Future[Bound],
) -> None:
    stop = asyncio.Event()
    try:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_AT_ONCE)
        server.add_generic_rpc_handlers((service.handler(),))
        port = _bind(server, address, secret)
        await server.start()
    except BaseException as error:
        bound.set_exception(error)
        raise
    bound.set_result((port, asyncio.get_running_loop(), stop))
    await stop.wait()
    await server.stop(_CLOSE_S)


def _bind(server: Any, address: str, secret: tuple[bytes, bytes] | None) -> int:
    if secret is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials([secret])
    return int(server.add_secure_port(address, credentials))
