"""Runs an engine of RR22, and relays what it sends to the other party.

The engine exchanges messages with a relay on loopback instead of the other party. The relay puts
the engine's messages into turns, and hands over what the other party's relay has put into them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Self

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, InputError, InternalError, PeerError, VflError
from vfl_common.files import write_error
from vfl_common.pb.vfl.v1.engine_pb2 import EnginePush
from vfl_party.rr22.engine import PORT_TAKEN
from vfl_party.rr22.turns import Message, Part, pack, unpack

VERSION = "0.9.5"
INSTALL = f"pip install --no-deps spu=={VERSION}"
_START_S, _TURN_S = 60.0, 600.0
# How often an engine is started if another process takes its port.
_TRIES = 3
# Between the name and the number of a message.
_SEPARATOR = b"\x01\x02"
_SERVICE = "/org.interconnection.link.ReceiverService/Push"
_TRACE = re.compile(rb"written to (/tmp/psi_[\w-]+\.trace)\.")
_SYNC = re.compile(rb"(root-\d+):\d+:ALLGATHER")
_BUSY = b"p_unfinished"
# The messages that a relay keeps because an earlier one is missing.
_MAX_EARLY = 1000
_MAX_PUSH = 8 << 20
# The program of an engine.
ENGINE = Path(__file__).with_name("engine.py")
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", _MAX_PUSH),
    ("grpc.max_receive_message_length", _MAX_PUSH),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]


def explain_absence() -> str:
    """Returns why the engine cannot run here; '' if it can."""
    try:
        version = importlib.metadata.version("spu")
    except importlib.metadata.PackageNotFoundError:
        return "the wheel spu is not installed"
    if version != VERSION:
        return f"the wheel spu must be {VERSION} (got {version})"
    return "" if _loads(find_package()) else "the engine of the wheel spu does not load"


def require_engine() -> None:
    """Raises InputError if the engine cannot run here."""
    if absence := explain_absence():
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: rows.psi.engine: "rr22" cannot run here: {absence}. Run `{INSTALL}` with '
            'CPython 3.11, or set engine = "x25519".',
        )


def find_package() -> str:
    """Returns the folder of the package ``spu``, without importing it."""
    spec = importlib.util.find_spec("spu")
    if spec is None or not spec.submodule_search_locations:
        raise InternalError("the wheel spu was removed during the run")
    return spec.submodule_search_locations[0]


@cache
def _loads(package: str) -> bool:
    """Returns whether a process can load the engine, which ends it if the processor lacks an
    instruction.
    """
    try:
        done = subprocess.run(
            _command(package),
            capture_output=True,
            timeout=_START_S,
            check=False,
            env=_make_environment(),
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _make_environment() -> dict[str, str]:
    """Returns the environment of an engine. Its temporary files go to its working folder."""
    own = {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
    return {"TMPDIR": ".", "MALLOC_ARENA_MAX": "2", **own}


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-I", str(ENGINE), *arguments]


class Engine:
    """The engine of this party on one bucket, with its relay. Use it as a context manager.

    Args:
        source: A CSV file with the columns ``id`` and ``row``, without two equal ids.
        result: The CSV file for the common rows.
        rank: 0 at the active party, the receiver; 1 at the passive party.
        peer: The name of the other party, for errors.
    """

    def __init__(self, source: Path, result: Path, rank: int, peer: str) -> None:
        self._rank, self._peer = rank, peer
        self._folder, self._names = source.parent, (f"./{source.name}", f"./{result.name}")
        self._log = source.with_suffix(".log")
        self._changed = threading.Condition()
        # The name of the engine's link, which only this relay knows.
        self._link = secrets.token_hex(16).encode()
        # {number: message} of messages from the engine that came before an earlier one; None: a
        # message that the relay has answered.
        self._early: dict[int, Message | None] = {}
        self._next = 1
        self._leaving: deque[Message] = deque()
        self._delivered = self._port = 0
        # {context of a synchronisation: the name of its last round}.
        self._finished: dict[bytes, bytes] = {}
        self._done = self._connected = False
        self._push: grpc.UnaryUnaryMultiCallable | None = None

    def __enter__(self) -> Self:
        for number in range(_TRIES):
            self._port, self._push = 0, None
            with contextlib.ExitStack() as opened:
                self._open(opened)
                try:
                    self._wait(lambda: self._connected, _START_S)
                except PeerError:
                    if number < _TRIES - 1 and self._process.poll() == PORT_TAKEN:
                        continue
                    raise
                self._opened = opened.pop_all()
                break
        return self

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Starts the relay and the engine."""
        threads = opened.enter_context(ThreadPoolExecutor(4, "rr22"))
        server = grpc.server(threads, handlers=(_Relay(self._take),), options=_GRPC_OPTIONS)
        relay = server.add_insecure_port("127.0.0.1:0")
        server.start()
        opened.callback(lambda: server.stop(None).wait())
        try:
            log = opened.enter_context(self._log.open("wb"))
        except OSError as error:
            raise write_error(self._log, error) from None
        # The engine passes names of files to a shell, so it gets plain names.
        self._process = opened.enter_context(
            subprocess.Popen(
                _command(find_package(), str(self._rank), str(relay), *self._names),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._folder,
                env=_make_environment(),
            )
        )
        opened.callback(self._process.kill)
        if self._process.stdin is not None:
            self._process.stdin.write(self._link)
            self._process.stdin.flush()
        threading.Thread(target=self._read_output, args=(self._process,), daemon=True).start()
        self._wait(lambda: self._port > 0, _START_S)
        channel = grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_GRPC_OPTIONS)
        opened.callback(channel.close)
        with self._changed:
            self._push = channel.unary_unary(_SERVICE)
            self._changed.notify_all()

    def __exit__(self, *_exception: object) -> None:
        self._opened.close()
        # The engine writes a file with the times of its stages, always here.
        for path in _TRACE.findall(self._log.read_bytes()):
            Path(path.decode()).unlink(missing_ok=True)

    def collect(self, part: Part) -> bytes:
        """Waits for the engine's messages of a turn, and returns them packed. Raises PeerError."""
        self._wait(lambda: len(self._leaving) >= part.messages, _TURN_S)
        with self._changed:
            messages = [self._leaving.popleft() for _ in range(part.messages)]
        return pack(messages, part)

    def deliver(self, data: bytes, part: Part) -> None:
        """Hands the other party's messages of a turn to the engine. Raises PeerError."""
        for key, value in unpack(data, part, self._peer):
            if sync := _SYNC.fullmatch(key):
                context = sync[1]
                self._wait(partial(self._finished.__contains__, context), _TURN_S)
                key = self._finished[context]
            self._hand_over(key, value)

    def finish(self) -> None:
        """Waits until the engine has written its result. Raises PeerError."""
        self._wait(lambda: self._done, _TURN_S)

    def _take(self, request: bytes) -> None:
        """Takes a message from the engine."""
        push = EnginePush.FromString(request)
        name, _, digits = push.key.partition(_SEPARATOR)
        value = push.value
        if name.startswith(b"connect_"):
            with self._changed:
                self._connected = True
                self._changed.notify_all()
            self._hand_over(b"connect_%d" % (1 - self._rank), b"", number=0)
            return
        # Another process of this machine does not know the link. Acknowledgements matter to a link
        # that closes, and this one is killed.
        if not name.startswith(self._link) or not digits.isdigit():
            return
        name = b"root" + name.removeprefix(self._link)
        sync = _SYNC.fullmatch(name)
        is_busy = sync is not None and value == _BUSY
        with self._changed:
            message = None if is_busy else Message(name, value)
            if sync is not None and not is_busy:
                self._finished[sync[1]] = name
                # Parties may differ in the number of rounds.
                message = Message(sync[1] + b":1:ALLGATHER", value)
            if not self._next <= int(digits) < self._next + _MAX_EARLY:
                return
            self._early[int(digits)] = message
            while self._next in self._early:
                ordered = self._early.pop(self._next)
                self._next += 1
                if ordered is not None:
                    self._leaving.append(ordered)
            self._changed.notify_all()
        self._send(b"ACK" + _SEPARATOR, digits)
        if is_busy:
            # Every five seconds the engine asks whether both parties have finished a stage.
            self._hand_over(name, _BUSY)

    def _hand_over(self, name: bytes, value: bytes, number: int | None = None) -> None:
        """Sends a message to the engine, as if it came from the other party."""
        self._wait(lambda: self._push is not None, _START_S)
        if number is None:
            with self._changed:
                self._delivered += 1
                number = self._delivered
        # The engine knows the link by its own name.
        if name.startswith(b"root"):
            name = self._link + name.removeprefix(b"root")
        self._send(name + _SEPARATOR + b"%d" % number, value)

    def _send(self, key: bytes, value: bytes) -> None:
        push = self._push
        if push is None:
            raise InternalError("rr22: the relay has no channel to its engine")
        message = EnginePush(sender_rank=1 - self._rank, key=key, value=value)
        try:
            push(message.SerializeToString(), timeout=_START_S, wait_for_ready=True)
        # ValueError: the channel is closed, because the alignment has failed.
        except (grpc.RpcError, ValueError):
            raise self._failure() from None

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        for line in process.stdout or ():
            with self._changed:
                if line.startswith(b"port "):
                    self._port = int(line.split()[1])
                self._done = self._done or line == b"done\n"
                self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Waits until ``ready()``. Raises PeerError if the engine ends before, or after a limit."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not ready():
                ended = self._process.poll() is not None and not self._done
                # Output that the engine wrote before it ended may not have been read yet.
                if (ended and not self._changed.wait(0.2)) or time.monotonic() > deadline:
                    raise self._failure()
                self._changed.wait(0.2)

    def _failure(self) -> InputError | PeerError:
        """Returns the error of an engine that ended, or that waits too long."""
        code = self._process.poll()
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        reasons = [n for n, line in enumerate(lines) if "rror" in line]
        reason = " ".join(lines[reasons[-1] : reasons[-1] + 3])[:300] if reasons else ""
        if code == -signal.SIGKILL or "Write error" in reason or "No space" in reason:
            return InputError(
                Code.DATA_INVALID,
                f"rows.psi.engine: the engine rr22 of this party ended (got {code}; {reason}). See "
                f"that {self._folder} and the memory have room, and begin a new run.",
            )
        return PeerError(
            Code.MALFORMED_MESSAGE,
            f"{self._peer}: the alignment with it failed, because the engine rr22 ended "
            f"or did not answer (got {code}). Begin a new run, or set rows.psi.engine = "
            '"x25519".',
            party=self._peer,
        ).privately(
            f"{self._peer}: the alignment with it failed, because the engine rr22 ended or did not "
            f"answer (got {code}; {reason}). Begin a new run, or set rows.psi.engine = "
            '"x25519".'
        )


class _Relay(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Takes what an engine sends to the other party."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != _SERVICE:
            return None
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        # The thread that waits for the engine reports its end. A stranger may send anything.
        with contextlib.suppress(VflError, DecodeError):
            self._take(request)
        return b""
