"""Serves metrics for Prometheus and the run's state on a separate port.

Counts are read only when Prometheus scrapes them, so the port does not slow down training. The
metrics contain names of parties, phases and metrics, and sums over many rows, but never an id, a
feature or a label.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from http import HTTPStatus
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vfl_common.bundle import Ledger, TcpCount
from vfl_common.errors import Code, InputError
from vfl_common.process.program import do_afterwards
from vfl_common.rpc.channel import check_address, split_address

LOOPBACK = "127.0.0.1"
# The time limit of one scrape.
REQUEST_S = 5.0
# The time between two checks whether the server must end.
_POLL_S = 0.1
_CLOSE_S = 1.0

Labels = tuple[str, ...]
Families = Callable[[], Iterable[Metric]]


def listen_address(text: str) -> str:
    """Returns the value of ``--metrics`` as ``host:port``. A port alone means the loopback
    interface.

    Raises InputError (ADDRESS_INVALID, ADDRESS_IN_USE) if this machine cannot listen there.
    """
    address = f"{LOOPBACK}:{text.removeprefix(':')}" if ":" not in text.removeprefix(":") else text
    try:
        check_address(address)
    except InputError as error:
        raise error.privately(f"--metrics: {error}") from None
    return address


class Port:
    """The open port of the metrics. ``address``: its host:port.

    ``linger_s``: the number of seconds for which the port stays open after the run; 0 to close it
    at once.
    """

    def __init__(self, server: _Server, address: str, linger_s: float) -> None:
        self._server, self.address, self.linger_s = server, address, linger_s

    def close(self) -> None:
        """Closes the port, without waiting for a slow caller."""
        # shutdown() waits for slow callers, so it runs in a thread.
        closing = threading.Thread(target=self._server.shutdown, daemon=True)
        closing.start()
        closing.join(timeout=_CLOSE_S)
        self._server.server_close()

    def linger(self, ended: threading.Event) -> None:
        """Keeps the port open for ``linger_s``, or until ``ended`` is set."""
        ended.wait(self.linger_s)


@contextmanager
def serve_metrics(
    address: str, families: Families, state: Callable[[], str], *, linger_s: float = 0.0
) -> Iterator[Port]:
    """Serves metrics at http://<address>/metrics and the run's state at /healthz.

    Args:
        address: The host:port; port 0 takes a free port.
        families: Returns the metrics, to which the memory and CPU time of this process are added.
        state: Returns the run's state, one of ``STATES``. The program is unhealthy if the state is
            failed.
        linger_s: The number of seconds for which the port stays open after the program has done
            everything else; 0 to close it at the end of the block.

    Raises InputError (ADDRESS_IN_USE).
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(families))
    host, port = split_address(address)
    try:
        server = _Server(host, port, registry, state)
    except OSError as error:
        raise InputError(
            Code.ADDRESS_IN_USE,
            f"--metrics: cannot listen on {address}: {error.strerror}. Choose another address, or "
            "port 0 for a free one.",
        ) from None
    threading.Thread(
        target=server.serve_forever, args=[_POLL_S], name="metrics", daemon=True
    ).start()
    opened = Port(server, f"{address.rpartition(':')[0]}:{server.server_address[1]}", linger_s)
    try:
        yield opened
    finally:
        if opened.linger_s:
            do_afterwards(opened.linger)
        else:
            opened.close()


class _Collector(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


class _Handler(MetricsHandler):
    """Serves the metrics at / and /metrics, and the run's state at /healthz."""

    state: Callable[[], str]

    def do_GET(self) -> None:  # noqa: N802 - the standard library's name
        path = self.path.partition("?")[0]
        if path in ("/", "/metrics"):
            super().do_GET()
        elif path == "/healthz":
            run_state = self.state()
            status = HTTPStatus.SERVICE_UNAVAILABLE if run_state == "failed" else HTTPStatus.OK
            body = f"{run_state}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)


class _Server(socketserver.TCPServer):
    """Serves one caller after another, so that many or slow callers use only one thread."""

    # A port that was just closed can be used again at once, as with the other ports.
    allow_reuse_address = True

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, state: Callable[[], str]
    ) -> None:
        facts = {"registry": registry, "timeout": REQUEST_S, "state": staticmethod(state)}
        handler = type("Handler", (_Handler,), facts)
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Closes the connection after ``REQUEST_S``, because the handler's own timeout restarts
        with each line.
        """
        guard = threading.Timer(REQUEST_S, _hang_up, [request])
        guard.name, guard.daemon = "metrics", True
        guard.start()
        try:
            super().finish_request(request, client_address)
        finally:
            guard.cancel()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores a caller that hangs up or is too slow."""


def _hang_up(request: socket.socket) -> None:
    # An error means that the caller has closed the connection already.
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


# -- metrics of both programs
# ----------------------------------------------------------------------


def make_gauge(name: str, text: str, values: Mapping[Labels, float], labels: Labels = ()) -> Metric:
    """Returns a gauge with a value for each combination of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def counter(name: str, text: str, values: Mapping[Labels, float], labels: Labels = ()) -> Metric:
    """Returns a counter; ``name`` ends in ``_total``."""
    family = CounterMetricFamily(name.removesuffix("_total"), text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def state(now: str, states: Iterable[str]) -> Metric:
    """Returns a gauge such as ``vfl_run_state{state="running"} 1``, with 0 for all other states."""
    return make_gauge(
        "vfl_run_state",
        "1 for the state that the run is in.",
        {(name,): name == now for name in states},
        ("state",),
    )


def traffic_counters(ledger: Ledger, tcp: Iterable[TcpCount]) -> Iterator[Metric]:
    """Yields counters of the ledger's current counts and of the kernel's counts at the last
    heartbeat.
    """
    labels: Labels = ("peer", "phase", "kind", "direction")
    payload: dict[Labels, float] = {}
    message: dict[Labels, float] = {}
    messages: dict[Labels, float] = {}
    for entry in ledger.entries():
        key = (entry.peer, entry.phase, entry.kind, entry.direction)
        payload[key], message[key] = entry.payload_bytes, entry.message_bytes
        messages[key] = entry.messages
    yield counter("vfl_payload_bytes_total", "Raw tensor data.", payload, labels)
    yield counter(
        "vfl_message_bytes_total", "Serialised messages, payload included.", message, labels
    )
    yield counter("vfl_messages_total", "Messages.", messages, labels)
    kernel: dict[Labels, float] = {}
    for count in tcp:
        kernel[count.peer, "sent"] = count.sent_bytes
        kernel[count.peer, "received"] = count.received_bytes
    yield counter(
        "vfl_tcp_bytes_total",
        "The kernel's count on connections, with TLS and HTTP/2 (Linux).",
        kernel,
        ("peer", "direction"),
    )


def certificate_gauge(ends: Mapping[str, datetime]) -> Metric:
    """Returns a gauge of the times at which certificates end. ``ends``: {name of the certificate's
    owner: time}; ``ca`` is the CA.
    """
    return make_gauge(
        "vfl_certificate_not_after_timestamp_seconds",
        "When the certificate ends (Unix time).",
        {(name,): end.timestamp() for name, end in ends.items()},
        ("certificate",),
    )


def make_awaited_gauge(roster: Iterable[str], names: Iterable[str]) -> Metric:
    """Returns a gauge that is 1 for the parties of ``roster`` for which this process waits now
    (``names``).
    """
    waited_for = frozenset(names)
    return make_gauge(
        "vfl_awaited",
        "1 while this process waits for the peer's part of a step.",
        {(name,): name in waited_for for name in roster},
        ("peer",),
    )
