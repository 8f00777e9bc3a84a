"""Reads the kernel's counts of this machine's network interfaces (Linux): all programs, headers of
every layer.

The loopback interface is left out, because on it every process of a simulation counts the bytes of
all.
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
_SIX = Path("/proc/self/net/if_inet6")
_SIOCGIFADDR = 0x8915

Counters = dict[str, tuple[int, int]]


def counters() -> Counters:
    """Returns {interface: (bytes sent, bytes received)} since it came up; nothing without /proc."""
    if not _COUNTS.exists():
        return {}
    counts = {}
    for line in _COUNTS.read_text().splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        counts[name.strip()] = (int(fields[8]), int(fields[0]))
    return counts


def carrying(addresses: Collection[str]) -> set[str]:
    """Returns the interfaces that have one of these local addresses, without loopback."""
    wanted = {
        address
        for address in addresses
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    }
    return {name for name, own in _addresses() if own in wanted} if wanted else set()


def _addresses() -> list[tuple[str, str]]:
    """Returns [(interface, one of its addresses)]; of IPv4 only the first address of each."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                # The interface has no IPv4 address.
                continue
            addresses.append((name, socket.inet_ntoa(answer[20:24])))
    for line in _SIX.read_text().splitlines() if _SIX.exists() else ():
        packed, *_, name = line.split()
        addresses.append((name, str(ipaddress.ip_address(bytes.fromhex(packed)))))
    return addresses
