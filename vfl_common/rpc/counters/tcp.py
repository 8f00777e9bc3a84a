"""Reads the kernel's counts of this process's connections (Linux, TCP_INFO): TLS and HTTP/2
included.

gRPC does not share its sockets, so they are found among this process's descriptors, and read
through a duplicate.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

from vfl_common.ledger import InterfaceCount, TcpCount
from vfl_common.rpc.counters import interfaces

_OURS = "/proc/self/fd"
_TCP_INFO_BYTES = 256
# The 64-bit fields tcpi_bytes_acked and tcpi_bytes_received at offset 120.
_COUNTS = struct.Struct("=QQ")
_COUNTS_OFFSET = 120
# Linux counts the client's SYN, and each FIN, as a byte, although they carry no data. The first
# byte of the answer, tcpi_state, says who has closed. FIN_WAIT2: our FIN is acknowledged.
# CLOSE_WAIT, LAST_ACK and CLOSING: the peer's FIN has arrived.
_OURS_CLOSED = (5,)
_THEIRS_CLOSED = (8, 9, 11)

Endpoint = tuple[str, int]


class TcpMeter:
    """Counts by peer. Closing a socket loses its counts, so ``sample`` is called now and then, and
    at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # {address that this process connects to: peer}
        self._names: dict[Endpoint, str] = {}
        # {address of an open incoming connection: peer}
        self._callers: dict[Endpoint, str] = {}
        self._counts: dict[tuple[Endpoint, Endpoint], tuple[int, int]] = {}
        # {peer: the counts of its connections that have ended}
        self._ended: dict[str, tuple[int, int]] = {}
        # The local addresses of connections to peers.
        self._used: set[str] = set()
        self._began = interfaces.counters()

    def name_address(self, address: str, peer: str) -> None:
        """Notes that connections to ``address`` (host:port) are to ``peer``."""
        host, _, port = address.rpartition(":")
        try:
            entries = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError, OverflowError):
            # The caller that dials it will report the error.
            return
        with self._lock:
            self._names.update({plain(entry[4]): peer for entry in entries})

    def name_caller(self, grpc_peer: str, peer: str) -> None:
        """Notes a caller's name; ``grpc_peer``: as in ``endpoint``."""
        caller = endpoint(grpc_peer)
        if caller is not None:
            with self._lock:
                self._callers[caller] = peer

    def sample(self) -> None:
        """Reads the kernel's counts of all connections that are open now; does nothing if they
        cannot be read.

        For closed connections it keeps only each peer's sum, and nothing for strangers, who can
        open any number. An open one may still get its name.
        """
        with self._lock:
            # Copied first, because a caller that is named later may not be among the sockets.
            known = self._callers.copy()
        connections = _open_connections()
        if connections is None:
            return
        with self._lock:
            self._counts.update(connections)
            for ends in self._counts.keys() - connections.keys():
                self._add(self._ended, ends, self._counts.pop(ends))
            open_now = {remote for _, remote in connections}
            for remote in known.keys() - open_now:
                self._callers.pop(remote, None)

    def _add(
        self,
        totals: dict[str, tuple[int, int]],
        ends: tuple[Endpoint, Endpoint],
        count: tuple[int, int],
    ) -> None:
        """Adds a connection's count to its peer's, if it has a name."""
        peer = self._callers.get(ends[1])
        dialled = peer is None
        if peer is None:
            peer = self._names.get(ends[1])
        if peer is not None:
            before = totals.get(peer, (0, 0))
            sent = max(0, count[0] - dialled)
            totals[peer] = (before[0] + sent, before[1] + count[1])
            self._used.add(ends[0][0])

    def counts(self) -> list[TcpCount]:
        """Returns the counts by peer, as of the last samples; leaves out connections to unknown
        addresses.
        """
        with self._lock:
            totals = self._ended.copy()
            for ends, count in self._counts.items():
                self._add(totals, ends, count)
        return [TcpCount(peer, *total) for peer, total in sorted(totals.items())]

    def interfaces(self) -> list[InterfaceCount]:
        """Returns the bytes since this meter was made, on the interfaces of connections to peers;
        none on loopback.
        """
        with self._lock:
            for ends in self._counts:
                self._add({}, ends, (0, 0))
            used = self._used.copy()
        now, names = interfaces.counters(), interfaces.carrying(used)
        counts = []
        for name in sorted(names & now.keys()):
            before = self._began.get(name, (0, 0))
            # The interface is new and counts from zero.
            if before[0] > now[name][0] or before[1] > now[name][1]:
                before = (0, 0)
            counts.append(InterfaceCount(name, now[name][0] - before[0], now[name][1] - before[1]))
        return counts


def _open_connections() -> dict[tuple[Endpoint, Endpoint], tuple[int, int]] | None:
    """Returns {(local, remote): (acknowledged, received)}; None if this process's descriptors
    cannot be listed.
    """
    connections = {}
    try:
        ours = [fd for _, fd in open_sockets()]
    except OSError:
        # No /proc, or too many open files; counting must not end a run.
        return None
    for fd in ours:
        try:
            with duplicate(fd) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    continue
                ends = (plain(copy.getsockname()), plain(copy.getpeername()))
                counts = counts_of(copy)
        except OSError:
            # Closed meanwhile, listening, or not connected.
            continue
        if counts is not None:
            connections[ends] = counts
    return connections


def open_files() -> list[str]:
    """Returns the descriptors of this process, as text. Raises OSError if they cannot be listed."""
    return os.listdir(_OURS)  # noqa: PTH208 - paths would cost more, ten times a second


def open_sockets() -> Iterator[tuple[str, int]]:
    """Yields (the socket's name in the kernel, its descriptor). Raises OSError as
    ``open_files``.
    """
    for entry in open_files():
        try:
            name = os.readlink(f"{_OURS}/{entry}")  # noqa: PTH115
        except OSError:
            continue
        if name.startswith("socket:"):
            yield name, int(entry)


def counts_of(connection: socket.socket) -> tuple[int, int] | None:
    """Returns the bytes that the other end has acknowledged, and those received, without FIN; None
    if an old kernel does not count. Where this process has dialled, the SYN is in the first.

    Raises OSError if it is no TCP connection.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _COUNTS_OFFSET + _COUNTS.size:
        return None
    sent, received = _COUNTS.unpack_from(info, _COUNTS_OFFSET)
    return sent - (info[0] in _OURS_CLOSED), received - (info[0] in _THEIRS_CLOSED)


def duplicate(fd: int) -> socket.socket:
    """Returns another socket for a descriptor, to be closed. Raises OSError if that is no socket
    any more.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def endpoint(grpc_peer: str) -> Endpoint | None:
    """Reads ``ipv4:10.0.0.7:4711`` or ``ipv6:%5B::1%5D:4711``, as gRPC gives a caller; None if it
    is something else.
    """
    host, _, port = (
        grpc_peer.partition(":")[2].replace("%5B", "").replace("%5D", "").rpartition(":")
    )
    return plain((host, int(port))) if port.isdigit() else None


def plain(address: tuple[object, ...]) -> Endpoint:
    """Returns an address in one form, so that IPv4 addresses look the same on IPv4 and IPv6
    sockets.
    """
    # gRPC gives a link's number too, and the kernel does not.
    host = str(address[0]).partition("%")[0]
    return host.removeprefix("::ffff:"), int(str(address[1]))
