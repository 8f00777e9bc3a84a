"""Callers without a certificate, in processes of their own: so they share neither files nor an
interpreter with a test.

    python -m tests.harness.strangers

reads attacks as JSON lines, one at a time, and writes what came of each. ``listen`` is the control:
an address at which the same load is accepted and thrown away.
"""

from __future__ import annotations

import json
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from tests.harness.federation import Federation, Program
from vfl_common.files import raise_file_limit
from vfl_common.rpc.channel import split_address

GARBAGE = random.Random(7).randbytes(2_000)  # noqa: S311 - no secret
# Files.
FEW = 256
ROOT = Path(__file__).resolve().parents[2]

Kind = Literal["half-open", "garbage"]


class FewFiles(Federation):
    """Starts those whom strangers call with a low limit of open files, which they cannot raise."""

    called: tuple[str, ...] = ("server",)

    def _start(
        self, name: str, args: list[str], environment: dict[str, str] | None = None
    ) -> Program:
        limit = (
            ["/bin/sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh"] if name in self.called else []
        )
        return super()._start(name, [*limit, *args], environment)


@dataclass(frozen=True)
class Attack:
    """Connects ``number`` times to the addresses in turn, ``rate`` times a second, or as fast as it
    can if 0.
    """

    kind: Kind
    addresses: tuple[str, ...]
    number: int
    rate: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What came of an attack. ``most_held``: half-open connections at one moment."""

    made: int
    failed: int
    seconds: float
    processor_s: float
    most_held: int = 0


def attack(asked: Attack) -> Outcome:
    """Attacks. Half-open connections stay open until the other side closes them, or the attack
    ends.
    """
    held: dict[int, socket.socket] = {}
    made = failed = most_held = 0
    ends = [split_address(address) for address in asked.addresses]
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    with selectors.DefaultSelector() as closed:
        for number in range(asked.number):
            if asked.rate:
                due_s = began_s + number / asked.rate
                time.sleep(max(0.0, due_s - time.monotonic()))
            try:
                caller = socket.create_connection(ends[number % len(ends)], 10.0)
                made += 1
                if asked.kind == "garbage":
                    with caller, suppress(OSError):
                        caller.sendall(GARBAGE)
                else:
                    held[caller.fileno()] = caller
                    closed.register(caller, selectors.EVENT_READ)
            except OSError:
                failed += 1
            for key, _ in closed.select(0) if held else ():
                closed.unregister(key.fd)
                held.pop(key.fd).close()
            most_held = max(most_held, len(held))
        seconds = time.monotonic() - began_s
        for caller in held.values():
            caller.close()
    return Outcome(made, failed, seconds, time.process_time() - began_cpu_s, most_held)


def _listen(listener: socket.socket) -> None:
    """Accepts, reads and throws away; closes a silent caller after as long as our programs do."""
    waiting: deque[tuple[float, socket.socket]] = deque()
    listener.settimeout(0.1)
    while True:
        with suppress(TimeoutError):
            caller = listener.accept()[0]
            caller.setblocking(False)
            waiting.append((time.monotonic() + 5.0, caller))
        while waiting and (waiting[0][0] < time.monotonic() or len(waiting) > 2_000):
            waiting.popleft()[1].close()
        with suppress(OSError):
            if waiting and waiting[-1][1].recv(4_096):
                waiting.pop()[1].close()


class Strangers:
    """Attacks from another process. One attack at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.strangers"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # The control's address.
        self.nowhere = str(json.loads(self._line())["listen"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, asked: Attack) -> None:
        """Begins an attack."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(asked)) + "\n")
        self._process.stdin.flush()

    def end(self) -> Outcome:
        """Waits for the attack's end."""
        return Outcome(**json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the strangers' process has ended"
        return line


def _main() -> None:
    raise_file_limit()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    threading.Thread(target=_listen, args=[listener], daemon=True).start()
    print(json.dumps({"listen": f"127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        print(json.dumps(asdict(attack(Attack(**asked)))), flush=True)


if __name__ == "__main__":
    _main()
