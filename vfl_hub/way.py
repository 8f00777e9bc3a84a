"""Measures the way from a node to the hub: ``vfl-party node FILE --check``."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from statistics import median

from vfl_common.errors import Code, LostError
from vfl_common.identity.credentials import Credentials
from vfl_hub.documents import sign_session
from vfl_hub.front import ECHO
from vfl_hub.settings import NodeFile
from vfl_hub.streams import Client, join_streams

_SIZE, _BLOCK, _TIMEOUT_S, _REPEATS = 8 * 2**20, 2**16, 30.0, 5


def measure_way(settings: NodeFile, credentials: Credentials) -> Iterator[str]:
    """Yields lines about the connection to the hub and about a tunnel.

    Raises LostError if the hub or the tunnel does not answer, and PeerError if the hub refuses.
    """
    address = settings.make_address()
    client = Client(address)
    proof = sign_session(credentials, settings.hub_pin)
    answer = client.ask("/v1/session", proof.value)
    way = "through the gateway" if settings.gateway else "to the hub"
    proxy = ", by the proxy" if settings.proxy else ""
    yield f"{settings.hub}: the connection {way}{proxy} works, and the hub knows {settings.name}"
    client.close()
    try:
        tunnel = address.open_tunnel(f"/tunnel/{ECHO}/{settings.name}", answer["echo"], _TIMEOUT_S)
    except OSError as error:
        raise LostError(
            Code.PARTY_LOST,
            f"{settings.hub}: a tunnel cannot be opened ({error}). Let proxy and gateway pass on "
            "requests with the header Upgrade, or set plain_tunnels = false.",
        ) from None
    # Two threads must not use one TLS connection.
    near, far = socket.socketpair()
    threading.Thread(target=join_streams, args=(far, tunnel), daemon=True).start()
    with near:
        try:
            round_trip_s, bytes_s = _measure(near)
        except OSError as error:
            raise LostError(
                Code.PARTY_LOST, f"{settings.hub}: the tunnel broke ({error}). Try again."
            ) from None
    around = "TLS" if not address.plain_tunnels else "no TLS around it"
    yield (
        f"a tunnel with {around} works: round trip {1000 * round_trip_s:.1f} ms, "
        f"{bytes_s / 1e6:.0f} MB/s in both directions at once"
    )


def _measure(tunnel: socket.socket) -> tuple[float, float]:
    """Returns the seconds of a round trip, and the bytes per second."""
    tunnel.settimeout(_TIMEOUT_S)
    times_s = []
    for _ in range(_REPEATS):
        begin_s = time.perf_counter()
        tunnel.sendall(b"x")
        _read(tunnel, 1)
        times_s.append(time.perf_counter() - begin_s)
    content = secrets.token_bytes(_SIZE)
    sender = threading.Thread(target=tunnel.sendall, args=(content,), daemon=True)
    begin_s = time.perf_counter()
    sender.start()
    _read(tunnel, _SIZE)
    return median(times_s), _SIZE / (time.perf_counter() - begin_s)


def _read(tunnel: socket.socket, size: int) -> None:
    while size:
        block = tunnel.recv(min(size, _BLOCK))
        if not block:
            raise ConnectionError("the hub or a proxy closed it")
        size -= len(block)
