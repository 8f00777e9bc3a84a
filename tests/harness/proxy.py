"""A TCP proxy between a passive party and the active party: counts bytes, stops them at a given
number, delays, cuts.

It sees TLS, so it knows steps only by their bytes: an exchange of B rows of an E-wide embedding is
4·B·E bytes each way and a little more, and the handshake a few KiB. ``hold_at`` names the byte
after which nothing passes; the step under way then cannot end before ``release``, however slow or
fast the machine is.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_READ_BYTES = 16384


class Proxy:
    """Listens on a free port of 127.0.0.1 and passes each connection on to ``target``.

    ``sent``: bytes that callers have sent through so far, over all connections; ``received``: bytes
    sent back to them. ``each``: both, of each connection. ``delay_s``: how long each piece of up to
    16 KiB waits, in either direction.
    """

    def __init__(self, target: str = "") -> None:
        self.target = target
        self.sent = self.received = 0
        self.each: list[list[int]] = []
        self.delay_s = 0.0
        self._hold_at: tuple[int | None, int | None] = (None, None)
        self._mute = False
        self._held = threading.Event()
        self._open = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @property
    def connections(self) -> int:
        return len(self.each)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self.release()
        self._listener.close()
        self.cut()

    def hold_at(self, *, sent: int | None = None, received: int | None = None) -> None:
        """Stops both directions once ``sent`` bytes have come from the callers, or ``received``
        bytes from the target.

        The bytes that reach the number are held back: ``sent`` leaves a request incomplete,
        ``received`` a reply that the target has computed.
        """
        with self._open:
            self._held.clear()
            self._hold_at = (sent, received)

    def hold_replies(self) -> None:
        """Holds all replies from now on; what the callers send still passes."""
        with self._open:
            self._mute = True

    def wait_until_held(self, timeout_s: float = 60.0) -> None:
        assert self._held.wait(timeout_s), (
            f"{self.sent} bytes sent and {self.received} received in {timeout_s} s, {self._hold_at} were expected"
        )

    def release(self) -> None:
        """Lets everything pass again, from now on."""
        with self._open:
            self._hold_at, self._mute = (None, None), False
            self._open.notify_all()

    def cut(self) -> None:
        """Closes every connection, as a broken network would; new ones may open at once."""
        with self._open:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=[caller], daemon=True).start()

    def _connect(self, caller: socket.socket) -> None:
        host, _, port = self.target.rpartition(":")
        if not port:
            # A party that was started again knocks before the one behind the proxy has an address.
            caller.close()
            return
        try:
            callee = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError:
            caller.close()
            return
        callee.settimeout(None)
        for end in (caller, callee):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._open:
            self._pairs.append((caller, callee))
            counts = [0, 0]
            self.each.append(counts)
        back = threading.Thread(
            target=self._pump, args=[callee, caller, False, counts], daemon=True
        )
        back.start()
        self._pump(caller, callee, True, counts)
        back.join()
        caller.close()
        callee.close()

    def _pump(
        self, source: socket.socket, sink: socket.socket, forth: bool, counts: list[int]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                counts[0 if forth else 1] += len(data)
                self._count(len(data), forth)
                if self.delay_s:
                    time.sleep(self.delay_s)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, nbytes: int, forth: bool) -> None:
        """Counts, then waits while the proxy holds."""
        with self._open:
            if forth:
                self.sent += nbytes
            else:
                self.received += nbytes
            while self._reached() or (self._mute and not forth):
                self._held.set()
                self._open.wait()

    def _reached(self) -> bool:
        sent, received = self._hold_at
        return (sent is not None and self.sent >= sent) or (
            received is not None and self.received >= received
        )
