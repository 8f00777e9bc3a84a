"""Creates gRPC channels and servers with mutual TLS, keepalive and limits on messages, and checks
their addresses.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import grpc
from cryptography.hazmat.primitives.serialization import Encoding

from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.files import raise_file_limit
from vfl_common.frames import FRAME_BYTES
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.diagnose import diagnose, fetch_certificate
from vfl_common.identity.keyring import Keyring
from vfl_common.process.logs import Rate
from vfl_common.rpc.guard import Door, compute_connection_limit
from vfl_common.text import host_and_port

# The maximum size of a message. A frame has 2 MiB of data and an envelope; gRPC refuses larger
# messages.
MAX_MESSAGE_BYTES = 2 * FRAME_BYTES

# The maximum number of bytes in flight on a stream. It allows 40 MB/s with a round trip of 200 ms.
LOOKAHEAD_BYTES = 8 << 20
_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanishes without closing its connection (power failure, unplugged cable) is
    # noticed after about 15 s. With the ping timeout, the same applies to a process that hangs
    # while its kernel still acknowledges; gRPC's default for it is a minute.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The number of bytes of a stream that gRPC reads ahead. By default gRPC adapts it to the
    # bandwidth, so a peer that sends faster than this process reads would fill hundreds of
    # megabytes.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # Messages are never compressed. A compressed message from a peer could decompress to a thousand
    # times its size.
    ("grpc.per_message_decompression", 0),
]
_SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SHARED_OPTIONS,
    # Two programs may not share a port: the second one gets an error.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A caller that has not completed the TLS handshake by then is disconnected.
    ("grpc.server_handshake_timeout_ms", 5_000),
    # The maximum number of streams of a connection. A party needs three; streams beyond the limits
    # of a service are refused separately.
    ("grpc.max_concurrent_streams", 100),
]

# The time limit for reading a peer's certificate.
_CERTIFICATE_S = 2.0
_RETRY_S = 0.1
# The rate at which new connections check whether this process's certificate has changed: 100 times
# at once, then 5 times per second.
_CHECK_EVERY_S, _MAX_CHECKS_AT_ONCE = 0.2, 100

# gRPC's types of a call and of a service's handler, for services outside this package.
Context: TypeAlias = grpc.ServicerContext
Handler: TypeAlias = grpc.GenericRpcHandler


class Service(Protocol):
    """A gRPC service of a listening process."""

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        ...


class CallLimit:
    """Limits the concurrent calls of each caller of a method, because a call occupies a thread and
    the memory of its messages until it ends.

    Args:
        max_calls: The maximum number of concurrent calls of one caller.
        what: The name of the calls in a refusal, as a plural.
    """

    def __init__(self, max_calls: int, what: str) -> None:
        self._max_calls, self._what = max_calls, what
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Counts a call of the caller ``name`` while the block runs. Raises PeerError (NAME_TAKEN)
        if the caller has too many calls.

        Call it before reading anything from the caller, so that a refused caller takes no memory.
        """
        with self._lock:
            if self._held[name] >= self._max_calls:
                raise PeerError(
                    Code.NAME_TAKEN,
                    f"{name} already has {self._max_calls} open {self._what}",
                    party=name,
                )
            self._held[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[name] -= 1
                if not self._held[name]:
                    del self._held[name]


def stream_handler(
    service: str, **methods: Callable[[Iterator[bytes], Context], Iterator[bytes]]
) -> Handler:
    """Returns a handler for bidirectional streams of raw bytes, so that each message can be counted
    before it is parsed.

    A method with one message in each direction is also a stream. For a unary method, gRPC would
    wait for the message in a thread, without a time limit, before the method can check the caller.
    """
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(serve) for name, serve in methods.items()
    }
    return grpc.method_handlers_generic_handler(service, handlers)


def dial(address: str, credentials: Credentials, peer: str) -> grpc.Channel:
    """Returns a channel to ``peer``, whose certificate must name ``peer`` exactly. The host name
    does not matter.

    Raises InputError if the peer's certificate cannot be read or is for another member
    (IDENTITY_MISMATCH), and PeerError if it is revoked (CERTIFICATE_INVALID) or its key is not the
    pinned one (IDENTITY_MISMATCH).
    """
    options = [
        *_SHARED_OPTIONS,
        ("grpc.ssl_target_name_override", peer),
        # A separate pool of connections avoids the back-off of an earlier attempt.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", 0),
        # By default gRPC reopens a stream that an ending peer has refused, and sometimes hangs for
        # ever (grpcio 1.85). With retries off, the callers of this module reopen streams.
        ("grpc.enable_retries", 0),
    ]
    trusted = _read_certificate(address, credentials, peer)
    tls = grpc.ssl_channel_credentials(trusted, credentials.key_pem, credentials.certificate_pem)
    return grpc.secure_channel(address, tls, options=options)


def _read_certificate(address: str, credentials: Credentials, peer: str) -> bytes:
    """Returns the peer's certificate in PEM, for a channel that trusts only this certificate.
    Raises errors as ``dial`` does.

    gRPC does not give a client the peer's certificate, and its own check accepts ``SERVER``, or a
    certificate with several names, for ``server``. So this function reads the certificate over a
    separate connection. The channel then accepts only that certificate.
    """
    certificate = fetch_certificate(address, credentials, peer, _CERTIFICATE_S)
    credentials.admit(peer, certificate)
    return certificate.public_bytes(Encoding.PEM)


def connect(
    address: str, credentials: Credentials, peer: str, timeout_s: float
) -> grpc.Channel | VflError:
    """Returns a channel that is ready, or the most specific error if no channel becomes ready
    within ``timeout_s``.

    Reading the peer's certificate may take the same time in addition.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            channel = dial(address, credentials, peer)
            break
        except PeerError as error:
            return error
        except InputError as error:
            # The peer may not listen yet, so the attempt is repeated.
            if error.code is not Code.UNREACHABLE or time.monotonic() >= give_up_s:
                return error
            time.sleep(_RETRY_S)
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        channel.close()
        return diagnose(address, credentials, peer, timeout_s=2.0)
    return channel


@contextmanager
def run_server(
    address: str, keyring: Keyring, services: Sequence[Service], threads: int
) -> Iterator[tuple[grpc.Server, str]]:
    """Starts a gRPC server and stops it at the end of the block. Yields the server and the address
    on which it listens, with the real port.

    Each new connection gets the keyring's current certificate. ``threads`` must be at least the
    number of streams that can be open at once; otherwise parties could wait for each other for
    ever.

    Raises:
        InputError: ADDRESS_INVALID, ADDRESS_IN_USE.
    """
    check_address(address)
    host = address.rpartition(":")[0]
    max_connections = compute_connection_limit(threads, raise_file_limit())
    door = Door(max_connections, threads)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=threads, thread_name_prefix="rpc"),
        handlers=[service.handler() for service in services],
        interceptors=[door],
        options=[*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", max_connections)],
    )
    try:
        port = server.add_secure_port(address, _server_credentials(keyring))
    except RuntimeError:
        raise _listen_error(address, "the port cannot be bound") from None
    server.start()
    try:
        with door.watch(port):
            yield server, f"{host}:{port}"
    finally:
        server.stop(grace=0.5).wait(timeout=5.0)


def _server_credentials(keyring: Keyring) -> grpc.ServerCredentials:
    """Returns a server's credentials for mutual TLS. At each connection, gRPC checks whether the
    certificates have changed.

    A check reads files, which delays the thread that trains. So if strangers connect hundreds of
    times per second, most of these connections use the result of the last check.
    """
    last, check_rate = keyring.current(), Rate(_CHECK_EVERY_S, _MAX_CHECKS_AT_ONCE)

    def configure(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
        pair = (credentials.key_pem, credentials.certificate_pem)
        return grpc.ssl_server_certificate_configuration(
            [pair], root_certificates=credentials.ca_pem
        )

    def reconfigure() -> grpc.ServerCertificateConfiguration | None:
        nonlocal last
        if check_rate.passes("", time.monotonic()) is None:
            return None
        current = keyring.current()
        if current.pems == last.pems:
            return None
        last = current
        return configure(current)

    return grpc.dynamic_ssl_server_credentials(
        configure(last), reconfigure, require_client_authentication=True
    )


def split_address(address: str) -> tuple[str, int]:
    """Splits ``host:port`` (or ``[::1]:7000``) into host and port. Raises InputError
    (ADDRESS_INVALID) if ``address`` has another form.
    """
    try:
        return host_and_port(address)
    except ValueError as error:
        raise InputError(Code.ADDRESS_INVALID, str(error)) from None


def means_all_addresses(address: str) -> bool:
    """Returns whether an address, such as 0.0.0.0:7001, means all interfaces of a machine. Clients
    cannot connect to such an address.
    """
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        # The host is a name, not an IP address.
        return False


def check_address(address: str) -> None:
    """Raises InputError (ADDRESS_INVALID, ADDRESS_IN_USE) if this machine cannot listen on
    host:port.

    It uses a plain socket, because gRPC only reports "failed to bind".
    """
    host, port = split_address(address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror:
        raise InputError(
            Code.ADDRESS_INVALID,
            f"cannot listen on {address}: this machine cannot resolve the host name. Use a name or "
            "IP address of this machine.",
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _listen_error(address, "another program is using it") from None
        raise _listen_error(address, str(error.strerror)) from None


def _listen_error(address: str, why: str) -> InputError:
    return InputError(
        Code.ADDRESS_IN_USE,
        f"cannot listen on {address}: {why}. Choose another address, or port 0 for a free one.",
    )


def get_caller_name(context: Context, keyring: Keyring) -> str:
    """Returns the name in the caller's certificate. Raises PeerError as ``Keyring.admit`` does."""
    return keyring.admit(context.auth_context()["x509_pem_cert"][0])
