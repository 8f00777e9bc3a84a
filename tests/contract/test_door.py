"""Strangers at the door: callers without a certificate who take up all connections that a process
accepts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2

from tests.contract.exchanges import WAIT_S, credentials, keyring
from vfl_common.rpc import channel
from vfl_common.rpc import guard as newcomers
from vfl_common.rpc.channel import connect, run_server, split_address
from vfl_common.rpc.guard import compute_patience_s
from vfl_common.rpc.health import Health

ME, REGISTRY = "active", 64
CHECK = "/grpc.health.v1.Health/Check"
# gRPC itself closes a silent connection after five seconds.
SOON_S = 2.0


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A process that accepts few connections."""
    monkeypatch.setattr(channel, "compute_connection_limit", lambda *_: REGISTRY)
    with run_server(
        "127.0.0.1:0", keyring(ME), [Health({}, keyring(ME), may_ask=["north", "south"])], 4
    ) as (_, found):
        yield found


def ask(over: grpc.Channel) -> None:
    over.unary_unary(CHECK)(health_pb2.HealthCheckRequest().SerializeToString(), timeout=WAIT_S)


def test_a_party_comes_in_while_strangers_take_up_all_connections(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And who has called before stays in, though its connection is the oldest."""
    inside = connect(address, credentials("north"), ME, WAIT_S)
    assert isinstance(inside, grpc.Channel)
    with inside, ExitStack() as strangers:
        ask(inside)
        changes: list[grpc.ChannelConnectivity] = []
        inside.subscribe(changes.append)
        held = [
            strangers.enter_context(socket.create_connection(split_address(address)))
            for _ in range(2 * REGISTRY)
        ]
        late = connect(address, credentials("south"), ME, SOON_S)
        assert isinstance(late, grpc.Channel), str(late)
        with late:
            ask(late)
        ask(inside)
        assert set(changes) <= {grpc.ChannelConnectivity.READY}
        held[0].settimeout(WAIT_S)
        assert held[0].recv(1) == b""
    assert [
        record.message for record in caplog.records if getattr(record, "event", "") == "strangers"
    ]


def test_few_strangers_are_left_to_their_deadline(address: str) -> None:
    with socket.create_connection(split_address(address)) as stranger:
        stranger.settimeout(1.0)
        with pytest.raises(TimeoutError):
            stranger.recv(1)


@pytest.mark.parametrize(
    ("strangers", "want"), [(0, 2.0), (80, 2.0), (100, 1.28), (160, 0.5), (100_000, 0.5)]
)
def test_of_many_strangers_each_has_less_time(strangers: int, want: float) -> None:
    assert compute_patience_s(strangers, few=80) == pytest.approx(want)


def test_who_has_begun_a_handshake_has_its_time_while_silent_strangers_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A party far away needs some round trips until it calls."""
    # gRPC's own deadline is 5 s.
    monkeypatch.setattr(newcomers, "_CALL_S", 4.0)
    with run_server("127.0.0.1:0", keyring(ME), [], 4) as (_, address), ExitStack() as strangers:
        ends = split_address(address)
        begun = strangers.enter_context(socket.create_connection(ends))
        # Of a handshake's first record.
        begun.sendall(b"\x16\x03\x01")
        silent = [strangers.enter_context(socket.create_connection(ends)) for _ in range(250)]
        silent[0].settimeout(WAIT_S)
        assert silent[0].recv(1) == b""
        begun.setblocking(False)
        with pytest.raises(BlockingIOError):
            begun.recv(1)


def test_grpc_knows_all_options() -> None:
    """It ignores others without a word."""
    library = Path(str(cygrpc.__file__)).read_bytes()
    for name, _ in channel._SERVER_OPTIONS:
        assert name.encode() + b"\0" in library, name


def test_strangers_do_not_have_the_certificates_read_for_each_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Callable[[], object]] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda _first, changed, **_: asked.append(changed)
    )
    mine = keyring(ME)
    reads = Mock(wraps=mine.current)
    monkeypatch.setattr(mine, "current", reads)
    channel._server_credentials(mine)
    (changed,) = asked
    began_s = time.monotonic()
    for _ in range(5_000):
        assert changed() is None
    assert 100 <= reads.call_count <= 102 + 5 * (time.monotonic() - began_s)
