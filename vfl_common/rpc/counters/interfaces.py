"""Reads the kernel's byte counts of this machine's network interfaces (Linux). They include the
traffic of all programs and the headers of every layer.

The loopback interface is left out, because in a simulation every process would count the bytes of
all processes on it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection
from pathlib import Path

# The kernel's files about this process's network namespace.
_COUNTS = Path("/proc/self/net/dev")
_IPV6_ADDRESSES = Path("/proc/self/net/if_inet6")
_SIOCGIFADDR = 0x8915

Counters = dict[str, tuple[int, int]]


def read_counters() -> Counters:
    """Returns {interface: (bytes sent, bytes received)} since the interface came up; an empty dict
    without /proc.
    """
    if not _COUNTS.exists():
        return {}
    counts = {}
    for line in _COUNTS.read_text().splitlines()[2:]:
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
