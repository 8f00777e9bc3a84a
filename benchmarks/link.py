"""A slow link between processes: ``python -m benchmarks.link --target HOST:PORT --rate 10Mbit/s
--latency 25ms``.

A TCP proxy of its own. Each direction is a pipe: the bytes of all connections pass its narrowest
point one after the other, at ``rate`` bits a second, and arrive ``latency`` later. Connections take
turns at the narrowest point, 8 KiB at a time, as fair queueing has it. The bytes are those of the
TCP streams (TLS and HTTP/2 included, headers of TCP and IP not), and there is no slow start and no
loss: a link that is used well.

It prints its address as one JSON line, and its counts as another when its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import click

from vfl.forecasting.network import read_bandwidth, read_latency

# What a connection may send before it is another's turn.
PIECE_BYTES = 8192
# Of sending at full rate may wait before the narrowest point; then nothing more is read.
_QUEUED_S = 0.05
_LEAST_QUEUED_BYTES = 4 * PIECE_BYTES
# Beyond that a sink is too slow, and its source waits.
_MOST_READY_BYTES = 1 << 20


@dataclass
class Pipe:
    """One direction. Times are those of ``time.monotonic``.

    ``clear_s``: when the narrowest point has passed on all that it was given. ``passed``: bytes
    given to it so far. ``busy_s``: for how long it has been at work, or will have been at
    ``clear_s``.
    """

    rate: float
    latency_s: float
    clear_s: float = 0.0
    passed: int = 0
    busy_s: float = 0.0

    def take(self, nbytes: int, now_s: float) -> float:
        """Takes bytes that came at ``now_s``; returns when the last of them arrives."""
        took_s = nbytes * 8 / self.rate
        self.clear_s = max(self.clear_s, now_s) + took_s
        self.passed += nbytes
        self.busy_s += took_s
        return self.clear_s + self.latency_s

    def full(self, now_s: float) -> bool:
        """Returns whether more bytes wait before the narrowest point than it holds."""
        held_s = max(_QUEUED_S, _LEAST_QUEUED_BYTES * 8 / self.rate)
        return self.clear_s - now_s > held_s

    def free_s(self) -> float:
        """Returns when it is not full any more."""
        return self.clear_s - max(_QUEUED_S, _LEAST_QUEUED_BYTES * 8 / self.rate)


@dataclass(eq=False)
class _Way:
    """The way of one connection's bytes from ``source`` to ``sink``; ``due``: (when, bytes), b"" at
    the end.
    """

    source: socket.socket
    sink: socket.socket
    pipe: Pipe
    due: deque[tuple[float, bytes]] = field(default_factory=deque)
    # Has arrived, and the sink does not take it yet.
    ready: bytearray = field(default_factory=bytearray)
    # The source has said its last.
    ended: bool = False
    closed: bool = False

    def may_read(self, now_s: float) -> bool:
        """Returns whether the source may say more: the pipe has room, and the sink keeps up."""
        return not (self.ended or self.pipe.full(now_s) or len(self.ready) > _MOST_READY_BYTES)

    def read(self, now_s: float) -> None:
        """Gives the pipe one piece of what the source has said. Raises OSError if the source is
        gone.
        """
        try:
            data = self.source.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        self.ended = not data
        self.due.append((self.pipe.take(len(data), now_s), data))

    def deliver(self, now_s: float) -> None:
        """Gives the sink what has arrived. Raises OSError if the sink is gone."""
        last = False
        while self.due and self.due[0][0] <= now_s:
            data = self.due.popleft()[1]
            last = last or not data
            self.ready += data
        while self.ready:
            try:
                sent = self.sink.send(self.ready)
            except BlockingIOError:
                break
            del self.ready[:sent]
        if last and self.ready:
            self.due.appendleft((now_s, b""))
        elif last:
            self.closed = True
            self.sink.shutdown(socket.SHUT_WR)


class SlowLink:
    """Listens on a free port of 127.0.0.1 and passes connections on to ``target``, in a thread of
    its own.

    ``up``: from the callers to the target; ``down``: back.
    """

    def __init__(self, target: str, rate: float, latency_s: float) -> None:
        self.target = target
        self.up, self.down = Pipe(rate, latency_s), Pipe(rate, latency_s)
        self.connections = 0
        self._ways: list[_Way] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="slow-link", daemon=True)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def __enter__(self) -> SlowLink:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._wake.close()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        """Moves bytes until the link is left; one thread for all connections, so that their order
        is one order.
        """
        with self._woken, self._listener:
            while True:
                now_s = time.monotonic()
                for way in self._ways:
                    if not way.closed:
                        self._guarded(way, way.deliver, now_s)
                if any(way.closed for way in self._ways):
                    self._ways = self._alive()
                reading = {way.source: way for way in self._ways if way.may_read(now_s)}
                writing = [way.sink for way in self._ways if way.ready]
                awake = select.select(
                    [self._listener, self._woken, *reading], writing, [], self._pause_s(now_s)
                )[0]
                if self._woken in awake:
                    break
                if self._listener in awake:
                    self._accept()
                now_s = time.monotonic()
                turns = [reading[each] for each in awake if each in reading]
                served = [
                    way
                    for way in turns
                    if way.may_read(now_s) and self._guarded(way, way.read, now_s)
                ]
                if served:
                    # Who was served goes behind the others.
                    self._ways.sort(key=lambda way: way in served)
            for way in self._ways:
                way.source.close()
                way.sink.close()

    def _pause_s(self, now_s: float) -> float | None:
        """Returns for how long nothing is due; None if nothing is under way."""
        due_s = [way.due[0][0] for way in self._ways if way.due and not way.ready]
        due_s += [way.pipe.free_s() for way in self._ways if not way.ended and way.pipe.full(now_s)]
        return max(0.0, min(due_s) - now_s) if due_s else None

    def _accept(self) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        try:
            callee = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError:
            caller.close()
            return
        for end in (caller, callee):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)
        self.connections += 1
        self._ways += [_Way(caller, callee, self.up), _Way(callee, caller, self.down)]

    def _guarded(self, way: _Way, act: Callable[[float], None], now_s: float) -> bool:
        """Calls ``act``; closes the connection both ways, and returns False, if one of its ends is
        gone.
        """
        try:
            act(now_s)
        except OSError:
            for each in self._ways:
                if each is way or each.source is way.sink:
                    each.ended = each.closed = True
                    each.due.clear()
                    each.ready.clear()
            return False
        return True

    def _alive(self) -> list[_Way]:
        """Returns the ways whose connection is open; closes the others."""
        by_ends: dict[frozenset[socket.socket], list[_Way]] = {}
        for way in self._ways:
            by_ends.setdefault(frozenset((way.source, way.sink)), []).append(way)
        gone = {ends for ends, ways in by_ends.items() if all(way.closed for way in ways)}
        for ends in gone:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.close()
        return [way for way in self._ways if frozenset((way.source, way.sink)) not in gone]


def counts(link: SlowLink) -> dict[str, float]:
    """Returns bytes and seconds of both directions."""
    return {
        "up_bytes": link.up.passed,
        "down_bytes": link.down.passed,
        "up_busy_s": round(link.up.busy_s, 4),
        "down_busy_s": round(link.down.busy_s, 4),
        "connections": link.connections,
        "cpu_s": round(sum(os.times()[:2]), 3),
    }


@click.command(help=__doc__)
@click.option("--target", required=True, help="HOST:PORT, where connections go on to.")
@click.option("--rate", required=True, help="In each direction: 10Mbit/s.")
@click.option("--latency", required=True, help="One way: 25ms.")
def main(target: str, rate: str, latency: str) -> None:
    """Serve until the standard input ends."""
    with SlowLink(target, read_bandwidth(rate), read_latency(latency)) as link:
        click.echo(json.dumps({"event": "ready", "address": link.address}))
        sys.stdout.flush()
        while line := sys.stdin.readline():
            if line.strip() == "counts":
                click.echo(json.dumps({"event": "counts", **counts(link)}))
                sys.stdout.flush()
        click.echo(json.dumps({"event": "counts", **counts(link)}))


if __name__ == "__main__":
    main()
