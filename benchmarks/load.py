"""Loads an HTTP port from one thread, with ready requests over connections that stay open: some
30 microseconds of a core a request, so that it takes little of what it measures.
"""

from __future__ import annotations

import json
import random
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_HEAD_END, _LENGTH = b"\r\n\r\n", b"content-length:"
_ANSWER_S, _IDLE_S = 30.0, 2.0


@dataclass(frozen=True)
class Answer:
    """An answer with status 200.

    ``due_s``: when its request should have been sent, as ``time.perf_counter`` says. ``ms``: from
    then until it was here. ``missing``: who took no part in its first row, and why, as JSON.
    """

    due_s: float
    ms: float
    missing: str


@dataclass
class Load:
    """What came of it. ``failed``: answers with another status, or too few rows. ``cpu_s``: of the
    generator.
    """

    answers: list[Answer] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def a_second(self) -> float:
        return len(self.answers) / self.seconds


def quantile(answers: Sequence[Answer], share: float) -> float:
    """Returns the milliseconds that so many of the answers took at most."""
    ordered = sorted(each.ms for each in answers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(eq=False)
class Line:
    """A connection. ``due_s``: when its request should have been sent. ``used_s``: when something
    came over it last.
    """

    address: tuple[str, int]
    due_s: float = 0.0
    used_s: float = 0.0
    socket: socket.socket | None = None
    heard: bytearray = field(default_factory=bytearray)
    wanted: int = 0

    def fileno(self) -> int:
        assert self.socket is not None
        return self.socket.fileno()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

    def send(self, request: bytes, due_s: float) -> None:
        # Who has nothing to ask for some seconds is hung up on.
        if self.socket is None or time.perf_counter() - self.used_s > _IDLE_S:
            self.close()
            self.socket = socket.create_connection(self.address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.due_s = due_s
        self.heard.clear()
        self.wanted = 0
        self.socket.sendall(request)

    def answer(self) -> bytes | None:
        """Returns the answer, once it is whole. Raises OSError if the connection ends."""
        assert self.socket is not None
        data = self.socket.recv(1 << 18)
        if not data:
            raise OSError("the connection was closed")
        self.heard += data
        if not self.wanted and (end := self.heard.find(_HEAD_END)) >= 0:
            head = bytes(self.heard[:end]).lower()
            at = head.index(_LENGTH) + len(_LENGTH)
            self.wanted = end + len(_HEAD_END) + int(head[at:].split(b"\r\n", 1)[0])
        self.used_s = time.perf_counter()
        return bytes(self.heard) if self.wanted and len(self.heard) >= self.wanted else None


def address_of(url: str) -> tuple[str, int]:
    """Returns host and port."""
    host, port = urlsplit(url).netloc.split(":")
    return host, int(port)


def request(ids: Sequence[str]) -> bytes:
    """Returns a request for the scores of ids."""
    body = json.dumps({"ids": ids}).encode()
    head = (
        "POST /v1/predict HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@contextmanager
def _connected(url: str, count: int) -> Iterator[list[Line]]:
    lines = [Line(address_of(url)) for _ in range(count)]
    try:
        yield lines
    finally:
        for each in lines:
            each.close()


# Returns when the next request is due; None: no more come.
Next = Callable[[], float | None]


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Returns what says whether so many seconds have not passed yet."""
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end_s


def closed(
    url: str, requests: Sequence[bytes], going: Callable[[], bool], connections: int, rows: int = 1
) -> Load:
    """Sends over each connection a request after its last answer, as long as ``going`` says so.

    ``requests``: they are chosen from. ``rows``: of each.
    """
    coming: Next = lambda: time.perf_counter() if going() else None  # noqa: E731 - a line
    return _loaded(url, requests, connections, rows, coming)


def poisson(
    url: str,
    requests: Sequence[bytes],
    going: Callable[[], bool],
    rate: float,
    connections: int = 256,
) -> Load:
    """Sends requests at random moments, ``rate`` a second, whether those before are answered or
    not.
    """
    choose = random.Random(1)  # noqa: S311 - a benchmark's arrivals
    due_s = time.perf_counter()

    def coming() -> float | None:
        nonlocal due_s
        due_s += choose.expovariate(rate)
        return due_s if going() else None

    return _loaded(url, requests, connections, 1, coming)


def _loaded(url: str, requests: Sequence[bytes], connections: int, rows: int, coming: Next) -> Load:
    choose = random.Random(2)  # noqa: S311 - a benchmark's choice of ids
    found = Load()
    with _connected(url, connections) as lines:
        free = list(lines)
        busy: set[Line] = set()
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
                _note(found, answer, rows, line.due_s)
        found.seconds = time.perf_counter() - began_s
        found.cpu_s = time.process_time() - cpu_s
    return found


def _note(found: Load, answer: bytes, rows: int, due_s: float) -> None:
    if not answer.startswith(b"HTTP/1.1 200") or answer.count(b'"id"') != rows:
        found.failed.append(answer)
        return
    ms = 1000 * (time.perf_counter() - due_s)
    missing = answer.partition(b'"missing":{')[2].partition(b"}")[0]
    found.answers.append(Answer(due_s, ms, missing.decode()))
