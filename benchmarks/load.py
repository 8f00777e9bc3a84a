"""Loads an HTTP port from one thread, with ready requests over connections that stay open: some
30 microseconds of a core a request, so that it takes little of what it measures.
"""

from __future__ import annotations

import json
import random
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_HEAD_END, _LENGTH = b"\r\n\r\n", b"content-length:"
_ANSWER_S = 30.0


@dataclass
class Load:
    """What came of it.

    ``took``: (second from the beginning, milliseconds to the answer) of each request. ``failed``:
    what was answered instead of 200. ``cpu_s``: of the generator.
    """

    took: list[tuple[float, float]] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def a_second(self) -> float:
        return len(self.took) / self.seconds

    def quantile(self, share: float) -> float:
        """Returns the milliseconds that so many requests stay below."""
        ordered = sorted(ms for _, ms in self.took)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(eq=False)
class _Line:
    """A connection. ``due_s``: when its request should have been sent."""

    socket: socket.socket
    due_s: float = 0.0
    heard: bytearray = field(default_factory=bytearray)
    wanted: int = 0

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, request: bytes, due_s: float) -> None:
        self.due_s = due_s
        self.heard.clear()
        self.wanted = 0
        self.socket.sendall(request)

    def answer(self) -> bytes | None:
        """Returns the answer, once it is whole. Raises OSError if the connection ends."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise OSError("the connection was closed")
        self.heard += data
        if not self.wanted and (end := self.heard.find(_HEAD_END)) >= 0:
            head = bytes(self.heard[:end]).lower()
            at = head.index(_LENGTH) + len(_LENGTH)
            self.wanted = end + len(_HEAD_END) + int(head[at:].split(b"\r\n", 1)[0])
        return bytes(self.heard) if self.wanted and len(self.heard) >= self.wanted else None


def request(ids: Sequence[str]) -> bytes:
    """Returns a request for the scores of ids."""
    body = json.dumps({"ids": ids}).encode()
    head = (
        "POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def _connected(url: str, count: int) -> Iterator[list[_Line]]:
    host, port = urlsplit(url).netloc.split(":")
    lines = [_Line(socket.create_connection((host, int(port)))) for _ in range(count)]
    for each in lines:
        each.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield lines
    finally:
        for each in lines:
            each.socket.close()


def closed(
    url: str, requests: Sequence[bytes], seconds: float, connections: int, rows: int = 1
) -> Load:
    """Sends over each connection a request after its last answer, for so long.

    ``requests``: they are chosen from. ``rows``: of each.
    """
    end_s = time.perf_counter() + seconds
    return _loaded(url, requests, connections, rows, _at_once(connections, end_s))


def poisson(
    url: str, requests: Sequence[bytes], seconds: float, connections: int, rate: float
) -> Load:
    """Sends requests at random moments, ``rate`` a second, whether those before are answered or
    not. Milliseconds count from these moments.
    """
    choose = random.Random(1)  # noqa: S311 - a benchmark's arrivals
    due, moments = 0.0, deque[float]()
    while (due := due + choose.expovariate(rate)) < seconds:
        moments.append(due)
    return _loaded(url, requests, connections, 1, _drawn(moments))


# Returns when the next request is due; None: no more come.
Next = Callable[[], float | None]


def _at_once(connections: int, end_s: float) -> Next:
    _ = connections
    return lambda: now if (now := time.perf_counter()) < end_s else None


def _drawn(moments: deque[float]) -> Next:
    began_s = time.perf_counter()
    return lambda: began_s + moments.popleft() if moments else None


def _loaded(
    url: str, requests: Sequence[bytes], connections: int, rows: int, coming: Next
) -> Load:
    choose = random.Random(2)  # noqa: S311 - a benchmark's choice of ids
    found = Load()
    with _connected(url, connections) as free:
        busy: set[_Line] = set()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        due_s = coming()
        while due_s is not None or busy:
            now_s = time.perf_counter()
            while due_s is not None and free and due_s <= now_s:
                line = free.pop()
                line.send(choose.choice(requests), due_s)
                busy.add(line)
                due_s = coming()
            wait_s = _ANSWER_S if due_s is None or not free else max(0.0, due_s - now_s)
            heard, _, _ = select.select(busy, (), (), wait_s)
            if not heard and wait_s == _ANSWER_S:
                raise TimeoutError(f"{len(busy)} requests have no answer")
            for line in heard:
                answer = line.answer()
                if answer is None:
                    continue
                busy.discard(line)
                free.append(line)
                _note(found, answer, rows, began_s, line.due_s)
        found.seconds = time.perf_counter() - began_s
        found.cpu_s = time.process_time() - cpu_s
    return found


def _note(found: Load, answer: bytes, rows: int, began_s: float, due_s: float) -> None:
    if not answer.startswith(b"HTTP/1.1 200") or answer.count(b'"id"') != rows:
        found.failed.append(answer)
        return
    now_s = time.perf_counter()
    found.took.append((due_s - began_s, 1000 * (now_s - due_s)))
