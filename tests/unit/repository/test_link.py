"""The slow link of the benchmarks, against arithmetic: N bytes take N·8/rate + latency, and
connections share it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.link import PIECE_BYTES, Pipe, SlowLink

RATE, LATENCY_S = 20e6, 0.03
# Of a machine that is at work elsewhere: lateness is never below zero.
MOST_LATE_S = 5.0


@contextlib.contextmanager
def answering(reply_bytes: int = 0) -> Iterator[str]:
    """Listens, reads each connection to its end, and then answers with so many bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=[connection], daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                pass
            connection.sendall(bytes(reply_bytes))

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        host, port = listener.getsockname()
        yield f"{host}:{port}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def swap(link: SlowLink, nbytes: int) -> tuple[float, int]:
    """Sends so many bytes and reads the answer to its end; returns the seconds, and the bytes of
    the answer.
    """
    host, port = link.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        began_s = time.monotonic()
        connection.sendall(bytes(nbytes))
        connection.shutdown(socket.SHUT_WR)
        got = 0
        while data := connection.recv(1 << 16):
            got += len(data)
        return time.monotonic() - began_s, got


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**6)), max_size=30))
def test_a_pipe_is_arithmetic(pieces: list[tuple[float, int]]) -> None:
    """What comes while it is at work waits; the last byte arrives as late as the bytes before it
    ask for.
    """
    pipe = Pipe(RATE, LATENCY_S)
    clear_s = 0.0
    for now_s, nbytes in sorted(pieces):
        clear_s = max(clear_s, now_s) + nbytes * 8 / RATE
        assert pipe.take(nbytes, now_s) == pytest.approx(clear_s + LATENCY_S)
        assert pipe.full(clear_s) is False
    assert pipe.passed == sum(nbytes for _, nbytes in pieces)
    assert pipe.busy_s == pytest.approx(pipe.passed * 8 / RATE)


@pytest.mark.parametrize(
    ("sent", "answered"), [(1, 1), (400_000, 1), (1, 400_000), (250_000, 250_000)]
)
def test_bytes_take_their_time(sent: int, answered: int) -> None:
    """One after the other: the request goes over, a round trip, the answer comes back."""
    want_s = (sent + answered) * 8 / RATE + 2 * LATENCY_S
    with answering(answered) as target, SlowLink(target, RATE, LATENCY_S) as link:
        turns = [swap(link, sent) for _ in range(3)]
        assert (link.up.passed, link.down.passed, link.connections) == (3 * sent, 3 * answered, 3)
    assert {got for _, got in turns} == {answered}
    assert all(want_s <= took_s <= want_s + MOST_LATE_S for took_s, _ in turns)
    assert link.up.busy_s + link.down.busy_s == pytest.approx(3 * (sent + answered) * 8 / RATE)


def test_connections_share_the_link() -> None:
    """Two that send at once take as long as one that sends all; directions do not share."""
    nbytes = 40 * PIECE_BYTES
    with answering(nbytes) as target, SlowLink(target, RATE, LATENCY_S) as link:
        alone_s, _ = swap(link, nbytes)
        took_s: list[float] = []
        callers = [
            threading.Thread(target=lambda: took_s.append(swap(link, nbytes)[0])) for _ in range(2)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    one_s = nbytes * 8 / RATE
    assert 2 * one_s + 2 * LATENCY_S <= alone_s <= 2 * one_s + 2 * LATENCY_S + MOST_LATE_S
    # The way there carries both requests, then the way back at least the later one's answer, and
    # perhaps both.
    assert (
        3 * one_s + 2 * LATENCY_S - 0.01 <= max(took_s) <= 4 * one_s + 2 * LATENCY_S + MOST_LATE_S
    )


def test_a_sender_is_held_back() -> None:
    """A sender that offers a second of bytes gets rid of them at the link's rate, not before."""
    nbytes = 12_000_000
    with answering() as target, SlowLink(target, 80e6, 0.001) as link:
        host, port = link.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            began_s = time.monotonic()
            connection.sendall(bytes(nbytes))
            sent_s = time.monotonic() - began_s
            passed = link.up.passed
    # Buffers of the kernel hold a part.
    assert sent_s >= 0.4
    assert passed * 8 / 80e6 <= sent_s + 0.1


def test_a_connection_ends_at_both_ends() -> None:
    """A target that is gone closes the caller's connection; the link serves the next one."""
    with answering(5) as target, SlowLink("127.0.0.1:1", RATE, 0.0) as link:
        assert swap(link, 0) == (pytest.approx(0.0, abs=MOST_LATE_S), 0)
        link.target = target
        assert swap(link, 10)[1] == 5
