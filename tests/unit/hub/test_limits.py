"""Hub and node go on when threads, descriptors, disks or databases are at their limits."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.harness.waiting import wait_until
from vfl_common.errors import Code, UnwritableError
from vfl_hub import front, node, runs
from vfl_hub.console import _MAX_WAITING, Checks
from vfl_hub.front import ECHO, Front, Tunnels


class EchoServer:
    """Answers each request for a tunnel with its path."""

    def serve(self, path: str, token: str, sock: socket.socket) -> None:
        del token
        sock.sendall(path.encode())
        sock.close()


def ask(address: str) -> bytes:
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 20) as sock:
        sock.sendall(b"GET /tunnel/x HTTP/1.1\r\n\r\n")
        return sock.recv(100)


class LimitedThread(threading.Thread):
    """A thread that cannot be started the first time."""

    refused = 0

    def start(self) -> None:
        if not LimitedThread.refused:
            LimitedThread.refused = 1
            raise RuntimeError("can't start new thread")
        super().start()


def test_a_port_goes_on_after_a_thread_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Front("127.0.0.1:0", None, None, EchoServer())
    LimitedThread.refused = 0
    monkeypatch.setattr(threading, "Thread", LimitedThread)
    with contextlib.suppress(ConnectionError):
        assert ask(served.address) == b""
    assert LimitedThread.refused
    assert ask(served.address) == b"/tunnel/x"
    served.close()


def test_a_slow_caller_is_closed_and_an_address_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(front, "_HEAD_S", 0.5)
    monkeypatch.setattr(front, "MAX_PER_ADDRESS", 2)
    served = Front("127.0.0.1:0", None, None, EchoServer())
    host, _, port = served.address.partition(":")
    slow = [socket.create_connection((host, int(port)), 20) for _ in range(2)]
    wait_until(lambda: len(served._waiting) == 2)
    with socket.create_connection((host, int(port)), 20) as third:
        assert third.recv(1) == b""
    for sock in slow:
        assert sock.recv(1) == b""
        sock.close()
    wait_until(lambda: not served._waiting and not served._num_connections)
    assert ask(served.address) == b"/tunnel/x"
    served.close()


def test_a_member_has_a_limited_number_of_tunnels() -> None:
    tunnels = Tunnels(b"secret", lambda _run: None, lambda: None)
    with tunnels._count("run", "bank") as is_allowed:
        assert is_allowed
    assert not tunnels._num_tunnels
    tunnels._num_tunnels["run", "bank"] = front.MAX_TUNNELS
    with tunnels._count("run", "bank") as is_allowed:
        assert not is_allowed


def test_a_token_of_the_echo_ends() -> None:
    tunnels = Tunnels(b"secret", lambda _run: None, lambda: None)
    for hours, works in ((0, True), (1, True), (2, False)):
        assert tunnels._is_echo_token(tunnels.make_echo_token("bank", hours), "bank") == works
    assert not tunnels._is_echo_token(tunnels.make_echo_token("bank"), "shop")
    assert not tunnels._is_echo_token(tunnels.make_token(ECHO, "bank"), "bank")


def test_a_key_that_cannot_be_stored_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pins:
        folder, _pins = Path("folder"), {"bank": "old"}

    def write(*_: Any, **__: Any) -> None:
        raise UnwritableError(Code.FILE_INVALID, "no room")

    monkeypatch.setattr(node, "write_atomic", write)
    pins: Any = Pins()
    with pytest.raises(UnwritableError):
        node.Node._save_pins(pins, {"bank": "new"})
    assert pins._pins == {"bank": "old"}


def test_a_run_that_cannot_be_written_leaves_no_address_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Forwarder:
        address = "127.0.0.1:1"

        def __init__(self, *_: Any) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    class Owner:
        folder = tmp_path

        class settings:  # noqa: N801 - an attribute
            name, launch = "shop", None

        def write_party_file(self, *_: Any) -> Path:
            raise UnwritableError(Code.FILE_INVALID, "no room")

    class Read:
        id = "0" * 64

        class proposal:  # noqa: N801 - an attribute
            data, recipe = {"shop": "main"}, {"name": "r"}

        class recipe:  # noqa: N801 - an attribute
            class active:  # noqa: N801 - an attribute
                name = "bank"

    monkeypatch.setattr(runs, "_Forwarder", Forwarder)
    owner, read = (Owner(), Read())
    with pytest.raises(UnwritableError):
        runs.OwnRun(owner, read, "token", "")  # type: ignore[arg-type]
    assert len(closed) == 2


def test_checks_wait_in_a_short_queue() -> None:
    begun, release = threading.Semaphore(0), threading.Event()

    class Slow:
        def preview(self, number: str) -> tuple[str, bool]:
            begun.release()
            release.wait(30)
            return number, True

    checks = Checks(Slow())  # type: ignore[arg-type]
    for number in range(50):
        checks.begin(str(number), again=False)
    assert begun.acquire(timeout=30)
    assert [checks.read(str(number)) for number in (0, _MAX_WAITING)] == [None, ("", False)]
    release.set()
    wait_until(lambda: checks.read("0") == ("0", True))
