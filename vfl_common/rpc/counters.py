"""Reads the kernel's byte counts of this process's connections (Linux, TCP_INFO), which include TLS
and HTTP/2, and of this machine's network interfaces, which include the traffic of all programs and
the headers of every layer.

gRPC does not give access to its sockets, so they are found among this process's file descriptors
and read through a duplicate.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from vfl_common.bundle import InterfaceCount, TcpCount

_DESCRIPTORS = "/proc/self/fd"
_TCP_INFO_BYTES = 256
# The 64-bit fields tcpi_bytes_acked and tcpi_bytes_received, at offset 120.
_COUNTS = struct.Struct("=QQ")
_COUNTS_OFFSET = 120
# Linux counts the client's SYN and each FIN as a byte, although they carry no data. The first byte
# of TCP_INFO, tcpi_state, shows which side has closed. In FIN_WAIT2 our FIN is acknowledged. In
# CLOSE_WAIT, LAST_ACK and CLOSING the peer's FIN has arrived.
_OUR_FIN_STATES = (5,)
_PEER_FIN_STATES = (8, 9, 11)

Endpoint = tuple[str, int]


class TcpMeter:
    """Counts the bytes of connections by peer. The counts of a socket are lost when it is closed,
    so ``sample`` must be called regularly and at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # {remote address of outgoing connections: peer}
        self._dialled_peers: dict[Endpoint, str] = {}
        # {remote address of an open incoming connection: peer}
        self._callers: dict[Endpoint, str] = {}
        self._counts: dict[tuple[Endpoint, Endpoint], tuple[int, int]] = {}
        # {peer: the sum of the counts of its closed connections}
        self._closed_counts: dict[str, tuple[int, int]] = {}
        # The local addresses of connections to peers.
        self._local_addresses: set[str] = set()
        self._initial_counts = read_counters()

    def name_address(self, address: str, peer: str) -> None:
        """Registers ``address`` (host:port) as the address of ``peer``."""
        host, _, port = address.rpartition(":")
        try:
            entries = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except (OSError, ValueError, OverflowError):
            # The code that connects to the address reports the error.
            return
        with self._lock:
            self._dialled_peers.update({normalise_address(entry[4]): peer for entry in entries})

    def name_caller(self, grpc_peer: str, peer: str) -> None:
        """Registers a caller's name. ``grpc_peer``: its address as gRPC gives it: see
        ``parse_endpoint``.
        """
        caller = parse_endpoint(grpc_peer)
        if caller is not None:
            with self._lock:
                self._callers[caller] = peer

    def sample(self) -> None:
        """Reads the kernel's counts of all open connections. Does nothing if they cannot be read.

        For closed connections it keeps only a sum for each peer, and nothing for unknown peers, who
        could open any number. An open connection may still be named later.
        """
        with self._lock:
            # The names are copied before the sockets are listed, because a caller that is named in
            # between may not be among the sockets.
            known_callers = self._callers.copy()
        connections = _open_connections()
        if connections is None:
            return
        with self._lock:
            self._counts.update(connections)
            for endpoints in self._counts.keys() - connections.keys():
                self._add_to_peer(self._closed_counts, endpoints, self._counts.pop(endpoints))
            open_now = {remote for _, remote in connections}
            for remote in known_callers.keys() - open_now:
                self._callers.pop(remote, None)

    def _add_to_peer(
        self,
        totals: dict[str, tuple[int, int]],
        endpoints: tuple[Endpoint, Endpoint],
        count: tuple[int, int],
    ) -> None:
        """Adds a connection's count to the total of its peer, if the peer is known."""
        peer = self._callers.get(endpoints[1])
        is_outgoing = peer is None
        if peer is None:
            peer = self._dialled_peers.get(endpoints[1])
        if peer is not None:
            previous = totals.get(peer, (0, 0))
            sent = max(0, count[0] - is_outgoing)
            totals[peer] = (previous[0] + sent, previous[1] + count[1])
            self._local_addresses.add(endpoints[0][0])

    def counts(self) -> list[TcpCount]:
        """Returns the counts by peer as of the last sample. Connections to unknown addresses are
        left out.
        """
        with self._lock:
            totals = self._closed_counts.copy()
            for endpoints, count in self._counts.items():
                self._add_to_peer(totals, endpoints, count)
        return [TcpCount(peer, *total) for peer, total in sorted(totals.items())]

    def interfaces(self) -> list[InterfaceCount]:
        """Returns the byte counts since this meter was created, for the interfaces of connections
        to peers, without loopback.
        """
        with self._lock:
            for endpoints in self._counts:
                self._add_to_peer({}, endpoints, (0, 0))
            local_addresses = self._local_addresses.copy()
        current_counts, names = (
            read_counters(),
            find_interfaces(local_addresses),
        )
        counts = []
        for name in sorted(names & current_counts.keys()):
            initial_count = self._initial_counts.get(name, (0, 0))
            # A smaller count means that the interface was replaced and counts from zero again.
            if (
                initial_count[0] > current_counts[name][0]
                or initial_count[1] > current_counts[name][1]
            ):
                initial_count = (0, 0)
            counts.append(
                InterfaceCount(
                    name,
                    current_counts[name][0] - initial_count[0],
                    current_counts[name][1] - initial_count[1],
                )
            )
        return counts


def _open_connections() -> dict[tuple[Endpoint, Endpoint], tuple[int, int]] | None:
    """Returns {(local, remote): (acknowledged, received)}; None if this process's descriptors
    cannot be listed.
    """
    connections = {}
    try:
        descriptors = [fd for _, fd in yield_sockets()]
    except OSError:
        # There is no /proc, or there are too many open files. Counting must not end a run.
        return None
    for fd in descriptors:
        try:
            with duplicate_socket(fd) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (
                    socket.AF_INET,
                    socket.AF_INET6,
                ):
                    continue
                endpoints = (
                    normalise_address(copy.getsockname()),
                    normalise_address(copy.getpeername()),
                )
                counts = read_counts(copy)
        except OSError:
            # The socket was closed meanwhile, or is not connected.
            continue
        if counts is not None:
            connections[endpoints] = counts
    return connections


def list_descriptors() -> list[str]:
    """Returns the descriptors of this process, as text. Raises OSError if they cannot be listed."""
    return os.listdir(_DESCRIPTORS)  # noqa: PTH208 - paths would cost more, ten times a second


def yield_sockets() -> Iterator[tuple[str, int]]:
    """Yields (the socket's name in the kernel, its descriptor) for each open socket. Raises OSError
    as ``list_descriptors`` does.
    """
    for entry in list_descriptors():
        try:
            name = os.readlink(f"{_DESCRIPTORS}/{entry}")  # noqa: PTH115
        except OSError:
            continue
        if name.startswith("socket:"):
            yield name, int(entry)


def read_counts(connection: socket.socket) -> tuple[int, int] | None:
    """Returns (acknowledged bytes, received bytes) of a connection, without FINs; None if an old
    kernel does not count them. If this process opened the connection, the acknowledged bytes
    include its SYN.

    Raises OSError if ``connection`` is not a TCP connection.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _COUNTS_OFFSET + _COUNTS.size:
        return None
    sent, received = _COUNTS.unpack_from(info, _COUNTS_OFFSET)
    return sent - (info[0] in _OUR_FIN_STATES), received - (info[0] in _PEER_FIN_STATES)


def duplicate_socket(fd: int) -> socket.socket:
    """Returns a duplicate socket for a descriptor; the caller must close it. Raises OSError if the
    descriptor is no longer a socket.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def parse_endpoint(grpc_peer: str) -> Endpoint | None:
    """Parses a caller's address as gRPC gives it, such as ``ipv4:10.0.0.7:4711`` or
    ``ipv6:%5B::1%5D:4711``. Returns None for other forms.
    """
    host, _, port = (
        grpc_peer.partition(":")[2].replace("%5B", "").replace("%5D", "").rpartition(":")
    )
    return normalise_address((host, int(port))) if port.isdigit() else None


def normalise_address(address: tuple[object, ...]) -> Endpoint:
    """Normalises an address, so that an IPv4 address is the same on IPv4 and IPv6 sockets."""
    # gRPC appends an IPv6 scope id, which the kernel does not.
    host = str(address[0]).partition("%")[0]
    return host.removeprefix("::ffff:"), int(str(address[1]))


# The kernel's files about this process's network namespace.
_INTERFACE_COUNTS = Path("/proc/self/net/dev")
_IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")
_SIOCGIFADDR = 0x8915
Counters = dict[str, tuple[int, int]]


# The loopback interface is left out, because in a simulation every process would count the bytes
# of all processes on it.
def read_counters() -> Counters:
    """Returns {interface: (bytes sent, bytes received)} since the interface came up; an empty dict
    without /proc.
    """
    if not _INTERFACE_COUNTS.exists():
        return {}
    counts = {}
    for line in _INTERFACE_COUNTS.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counts[name.strip()] = (int(fields[8]), int(fields[0]))
    return counts


def find_interfaces(addresses: Collection[str]) -> set[str]:
    """Returns the names of the interfaces that have one of these local addresses, without
    loopback.
    """
    wanted = {
        address
        for address in addresses
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    }
    return (
        {name for name, local_address in _list_addresses() if local_address in wanted}
        if wanted
        else set()
    )


def _list_addresses() -> list[tuple[str, str]]:
    """Returns a list of (interface, one of its addresses). Of several IPv4 addresses only the first
    is included.
    """
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query_socket:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(
                    query_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                # The interface has no IPv4 address.
                continue
            addresses.append((name, socket.inet_ntoa(reply[20:24])))
    for line in _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else ():
        packed, *_, name = line.split()
        addresses.append((name, str(ipaddress.ip_address(bytes.fromhex(packed)))))
    return addresses
