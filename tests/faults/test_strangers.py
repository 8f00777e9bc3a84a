"""Callers without a certificate: they take nothing that the parties need."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.harness.cases import digits, recipe
from tests.harness.federation import Program
from tests.harness.strangers import FEW, GARBAGE, FewFiles
from tests.harness.usage import usage
from vfl_common.rpc.channel import split_address

WAVE = 400


@contextmanager
def half_open(address: str, number: int = WAVE) -> Iterator[list[socket.socket]]:
    """Connects this often and begins no handshake."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(split_address(address), 10.0))
            for _ in range(number)
        ]


def wait_until_closed(callers: list[socket.socket], timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    for caller in callers:
        caller.settimeout(max(0.01, give_up_s - time.monotonic()))
        with suppress(ConnectionError):
            assert caller.recv(1) == b""


def test_half_open_connections_end_no_run(tmp_path: Path) -> None:
    """More of them than there are files, at the server and at the active party, while a party
    joins.
    """
    with FewFiles(tmp_path / "f", recipe(2), digits(2)) as federation:
        federation.called = ("server", "p0")
        server = federation.start_server()
        active = federation.start_party("p0")
        # With few files it is no fork: it imports torch, 4 s of a core that others may use too.
        address = active.wait_for("ready")["address"]
        server.wait_for("joined", party="p0")
        with half_open(federation.address) as at_server, half_open(address) as at_active:
            federation.start_party("p1")
            wait_until_closed(at_server + at_active, 20.0)
            server.wait_for("joined", 30.0, party="p1")
            federation.finish()
        for name in federation.called:
            log = (federation.run_folder / name / "log.jsonl").read_text()
            assert log.count(f"may open only {FEW} files") == 1, name


def memory_mib(program: Program) -> float:
    found = usage(program.pid)
    assert found is not None
    return found.rss_mib


def speak_garbage(address: str, times: int) -> None:
    for _ in range(times):
        with (
            suppress(ConnectionError),
            socket.create_connection(split_address(address), 10.0) as caller,
        ):
            caller.sendall(GARBAGE)


def test_garbage_leaves_memory_as_it_is(tmp_path: Path) -> None:
    """The first connections fill buffers that the next ones use again; and the server goes on to
    serve.
    """
    with FewFiles(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        speak_garbage(federation.address, 1_000)
        before_mib = memory_mib(server)
        speak_garbage(federation.address, 2_000)
        assert memory_mib(server) - before_mib < 16.0
        for name in federation.names:
            federation.start_party(name)
        federation.finish()
