"""Checks who can reach the ports of an active party that serves."""

from __future__ import annotations

import ipaddress

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.rpc.channel import split_address


def check_open(settings: ServeSettings) -> None:
    """Raises InputError if other machines reach a port without tokens or with half a key pair."""
    if (settings.certificate is None) != (settings.key is None):
        raise InputError(
            Code.CONFIG_INVALID, "serve: certificate and key belong together. Set both or neither."
        )
    reached = _reachable_ports(settings)
    if settings.tokens is None and reached:
        key, address = next(iter(reached.items()))
        raise InputError(
            Code.CONFIG_INVALID,
            f"{key}: other machines can reach {address}, and no token is required. Set "
            "serve.tokens to a file that vfl-party token writes, or use 127.0.0.1.",
        )


def plain_words(settings: ServeSettings) -> str | None:
    """Returns what to say if tokens travel where others can read them; None if they do not."""
    reached = _reachable_ports(settings)
    if not reached or settings.certificate is not None:
        return None
    return (
        f"{' and '.join(reached)}: without a certificate, tokens cross the network in plain text. "
        "Set serve.certificate and serve.key, unless a proxy in front of this port uses HTTPS."
    )


def _reachable_ports(settings: ServeSettings) -> dict[str, str]:
    """Returns {key: address} of the ports that others than this machine can reach."""
    ports = {"serve.http": settings.http, "serve.grpc": settings.grpc}
    return {
        key: address
        for key, address in ports.items()
        if address is not None and not _is_local(split_address(address)[0])
    }


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hosts(settings: ServeSettings) -> frozenset[str] | None:
    """Returns the names under which callers may reach the port; None: any, since they need a
    token.
    """
    if settings.tokens is not None:
        return None
    return frozenset(("localhost", "127.0.0.1", "[::1]", split_address(settings.http)[0]))
