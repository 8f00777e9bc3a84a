"""RR22: private set intersection of two parties by oblivious transfer (Rindal and Raghuraman, CCS
2022), by the engine in SecretFlow's wheel ``spu``.

The engine of each party is a process that exchanges messages with a relay on loopback instead of
the other party. The relay puts the engine's messages into turns, and hands over what the other
party's relay has put into them. So an engine opens no port to the network, and all that it sends
passes the party's exchanges.

The engine pads nothing, but the relay does: a turn has a size that depends only on the padded sizes
of both sets (``make_turns``). A message that does not fit is an error.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Self

import grpc
import numpy as np

from vfl_common.errors import Code, InputError, InternalError, PeerError, VflError
from vfl_common.files import write_error
from vfl_party.rr22.engine import PORT_TAKEN

VERSION = "0.9.5"
INSTALL = f"pip install --no-deps spu=={VERSION}"
# A set is padded to one of these numbers of rows. {rows of the larger set: (bytes of a message of
# the sender's oblivious transfers, 1-KiB batches of the receiver's transfers, bytes of its encoded
# set)}, as the engine sends them; a test compares them with the engine.
_SIZES = {
    1024: (512, 862, 23_488),
    2048: (768, 869, 44_752),
    4096: (1024, 875, 86_512),
    8192: (1280, 882, 168_928),
    16_384: (1536, 889, 332_336),
    32_768: (1792, 895, 696_512),
    49_152: (2048, 902, 1_052_112),
    65_536: (2048, 902, 1_408_512),
    98_304: (2304, 909, 2_121_888),
    131_072: (2304, 909, 2_831_616),
    163_840: (2560, 915, 3_552_640),
    196_608: (2560, 915, 4_260_864),
    229_376: (2560, 915, 4_964_512),
    262_144: (2560, 915, 5_679_104),
    294_912: (2560, 915, 6_404_832),
    327_680: (2816, 922, 7_119_360),
    360_448: (2816, 922, 7_831_296),
    393_216: (2816, 922, 8_540_928),
}
# The engine sends at most 4 MiB in a message, the window of HTTP/2, and 10 bytes a row.
MAX_ROWS = max(_SIZES)
# The encoded set is sent in pieces of this size.
_PIECE = 1_600_000
# The engine compares hashes of this many bits beyond the logarithm of the number of pairs.
_STATISTICAL_BITS = 40
# Probes find a loss of 0.4 % of the rows of a bucket of 32,768 rows with a probability of 98 %.
_ROWS_A_PROBE, _MIN_PROBES = 32, 64
_KIB, _KIBS_A_MESSAGE = 1024, 64
_TREES, _TREE_CHECK = 53, 13_568
_GATHERED, _OVERHEAD = 64, 64
_START_S, _TURN_S = 60.0, 600.0
# How often an engine is started if another process takes its port.
_TRIES = 3
_SERVICE = "/org.interconnection.link.ReceiverService/Push"
_TRACE = re.compile(rb"written to (/tmp/psi_[\w-]+\.trace)\.")
_SYNC = re.compile(rb"(root-\d+):\d+:ALLGATHER")
_BUSY, _FINISHED = b"p_unfinished", b"p_finished"
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
    return "" if _loads(_find_package()) else "the engine of the wheel spu does not load"


def require_engine() -> None:
    """Raises InputError if the engine cannot run here."""
    if absence := explain_absence():
        raise InputError(
            Code.CONFIG_INVALID,
            f'recipe: rows.psi.engine: "rr22" cannot run here: {absence}. Run `{INSTALL}` with '
            'CPython 3.11, or set engine = "x25519".',
        )


def _find_package() -> str:
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


@dataclass(frozen=True)
class Part:
    """What one party sends in a turn.

    Args:
        names: The names of the engine's messages.
        content: The bytes of all messages together.
        values: {name: the only content that a message may have}.
        rows: If the first message has the positions of common rows: the number of rows that the
            positions are below. ``content`` is then a maximum.
        is_free: Whether ``content`` is a maximum.
    """

    names: tuple[bytes, ...] = ()
    content: int = 0
    values: Mapping[bytes, bytes] = field(default_factory=dict)
    rows: int = 0
    is_free: bool = False

    @property
    def messages(self) -> int:
        """The number of messages."""
        return len(self.names)

    @property
    def size(self) -> int:
        """The bytes on the wire, with room for the names."""
        return self.content + _OVERHEAD * len(self.names)

    def allows(self, messages: Sequence[Message]) -> bool:
        """Returns whether these may be the messages of this turn."""
        content = {message.key: message.value for message in messages}
        if sorted(message.key for message in messages) != sorted(self.names):
            return False
        if any(content[name] != value for name, value in self.values.items()):
            return False
        size = sum(map(len, content.values()))
        if size > self.content or (size < self.content and not (self.is_free or self.rows)):
            return False
        if not self.rows:
            return True
        positions = content[self.names[0]]
        if len(positions) % 4 or len(positions) < size:
            return False
        rows_P = np.frombuffer(positions, "<u4")
        return bool(np.all(rows_P < self.rows)) and len(np.unique(rows_P)) == len(rows_P)


class Turn(NamedTuple):
    """A turn: the passive party sends ``up``, and the active party answers with ``down``."""

    up: Part
    down: Part


class Buckets(NamedTuple):
    """How two sets are divided. Each bucket of a party is padded to the same number of rows.

    ``number``: the number of buckets; ``active``, ``passive``: the padded rows of a bucket.
    """

    number: int
    active: int
    passive: int

    @property
    def probes(self) -> int:
        """The number of known common rows in each bucket, by which lost rows are noticed."""
        return count_probes(min(self.active, self.passive))


def count_probes(size: int) -> int:
    """Returns the number of known common rows in a bucket of ``size`` padded rows."""
    return max(_MIN_PROBES, size // _ROWS_A_PROBE)


def divide(active: int, passive: int) -> Buckets:
    """Returns how sets of these sizes are divided into buckets: few, with little padding.

    Rows are dealt by a hash, so a bucket has room for eight standard deviations above the mean.
    Each bucket has at least one row of padding. So no two sets are equal, and the digests of whole
    sets that engines compare first tell nothing.
    """
    minimum = 1
    while _need(max(active, passive), minimum) > MAX_ROWS - count_probes(MAX_ROWS):
        minimum += max(1, minimum // 16)

    def make(count: int) -> Buckets:
        return Buckets(count, _pad(_need(active, count)), _pad(_need(passive, count)))

    candidates = [make(count) for count in range(minimum, minimum + 1 + minimum // 4 + 4)]
    return min(candidates, key=_estimate_cost)


def _need(rows: int, buckets: int) -> int:
    mean = rows / buckets
    return 1 + (rows if buckets == 1 else math.ceil(mean + 8 * math.sqrt(mean) + 8))


def _pad(rows: int) -> int:
    return next((size for size in _SIZES if size - count_probes(size) >= rows), MAX_ROWS)


def _estimate_cost(buckets: Buckets) -> int:
    """Returns the time of an alignment as a number of rows. A bucket costs half a second more."""
    return buckets.number * (buckets.active + buckets.passive + 100_000)


def make_turns(receiver: int, sender: int) -> list[Turn]:
    """Returns the turns of a bucket. The active party is the receiver, rank 0 of the engine.

    Args:
        receiver: The padded rows of the active party.
        sender: The padded rows of the passive party.
    """
    # The engine encodes the receiver's set with room for the larger set.
    transfers, kibs, encoded = _SIZES[max(receiver, sender)]
    pairs_bits = math.ceil(math.log2(receiver * sender))
    hash_bytes = min(16, math.ceil((_STATISTICAL_BITS + pairs_bits) / 8))
    large, small = divmod(kibs, _KIBS_A_MESSAGE)
    numbers = [b"\x08" + _encode_size(rows) for rows in (sender, receiver)]

    def gather(name: bytes, values: Sequence[bytes] = ()) -> Turn:
        name += b":ALLGATHER"
        fixed = [{name: value} for value in values] or [{}, {}]
        up, down = (Part((name,), _GATHERED, content, is_free=True) for content in fixed)
        return Turn(up, down)

    def direct(context: bytes, first: int, count: int, content: int, *, up: bool) -> Part:
        way = b"1->0" if up else b"0->1"
        names = (b"root-%b:P2P-%d:%b" % (context, n, way) for n in range(first, first + count))
        return Part((*names,), content)

    barrier = Part((b"root:5:BARRIER",))
    masks = direct(b"intersection", 1, 2, hash_bytes * sender, up=True)
    common = direct(b"intersection", 1, 2, 4 * min(receiver, sender), up=False)
    return [
        gather(b"root:1"),
        gather(b"root-0:1", [_FINISHED] * 2),
        gather(b"root:2"),
        gather(b"root:3"),
        gather(b"root:4", numbers),
        gather(b"root-1:1", [_FINISHED] * 2),
        Turn(barrier, barrier),
        gather(b"root-read:1", numbers),
        Turn(Part(), direct(b"read", 1, 2, 48, up=False)),
        Turn(
            direct(b"read", 1, 1, 4096, up=True),
            direct(b"read", 3, 1 + large + small, 4096 + kibs * _KIB, up=False),
        ),
        Turn(
            direct(b"read", 2, _TREES + 1, _TREES * transfers + _TREE_CHECK, up=True),
            direct(b"run", 1, math.ceil(encoded / _PIECE), encoded, up=False),
        ),
        # The receiver tells the sender which of its rows are common, four bytes each.
        Turn(masks, replace(common, rows=sender)),
        gather(b"root-2:1", [_FINISHED] * 2),
        gather(b"root:6", numbers),
        gather(b"root-3:1", [_FINISHED] * 2),
    ]


class Message(NamedTuple):
    """A message of an engine: the name of its step and its content."""

    key: bytes
    value: bytes


def pack(messages: Sequence[Message], part: Part) -> bytes:
    """Returns the messages of a turn, padded to its size. Raises InputError if the engine does not
    send what it should.
    """
    if not part.allows(messages):
        raise InputError(
            Code.DATA_INVALID,
            f"rr22: the engine sent unexpected messages (got {len(messages)} in a turn of "
            f'{part.content:,} bytes). Set rows.psi.engine = "x25519", and report this error.',
        )
    data = bytearray()
    for key, value in messages:
        data += len(key).to_bytes(1, "little") + len(value).to_bytes(4, "little") + key + value
    return bytes(data.ljust(part.size, b"\0"))


def unpack(data: bytes, part: Part, party: str) -> list[Message]:
    """Returns the messages of a peer's turn. Raises PeerError, which names ``party``, if they are
    not those of the turn.
    """
    messages, position = [], 0
    for _ in range(part.messages):
        key_end = position + 5 + data[position] if position < len(data) else 0
        end = key_end + int.from_bytes(data[position + 1 : position + 5], "little")
        if not 0 < end <= len(data):
            raise _make_malformed_error(party)
        messages.append(Message(data[position + 5 : key_end], data[key_end:end]))
        position = end
    if any(data[position:]) or not part.allows(messages):
        raise _make_malformed_error(party)
    return messages


def _make_malformed_error(party: str) -> PeerError:
    return PeerError(
        Code.MALFORMED_MESSAGE,
        f"{party}: sent a malformed turn of the engine rr22. Begin a new run.",
        party=party,
    )


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
                _command(_find_package(), str(self._rank), str(relay), *self._names),
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
        fields = dict(_parse(request))
        name, _, digits = fields.get(2, b"").partition(b"\x01\x02")
        value = fields.get(3, b"")
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
        self._send(b"ACK\x01\x02", digits)
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
        self._send(name + b"\x01\x02%d" % number, value)

    def _send(self, key: bytes, value: bytes) -> None:
        push = self._push
        if push is None:
            raise InternalError("rr22: the relay has no channel to its engine")
        request = b"\x08\x01" if self._rank == 0 else b""
        for tag, data in ((b"\x12", key), (b"\x1a", value)):
            request += tag + _encode_size(len(data)) + data
        try:
            push(request, timeout=_START_S, wait_for_ready=True)
        except grpc.RpcError:
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
        # The thread that waits for the engine reports its end.
        with contextlib.suppress(VflError):
            self._take(request)
        return b""


def _parse(request: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the numbers and contents of the fields of a Protobuf message that are bytes."""
    position = 0
    while position < len(request):
        tag, position = request[position], position + 1
        value, position = _decode_size(request, position)
        if tag & 7 == 2:
            yield tag >> 3, request[position : position + value]
            position += value


def _decode_size(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, position = data[position], position + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


def _encode_size(size: int) -> bytes:
    encoded = bytearray()
    while size > 127:
        encoded.append(size & 127 | 128)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)
