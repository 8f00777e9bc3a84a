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
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Self

import grpc

from vfl_common.errors import Code, InputError, InternalError, PeerError, VflError

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
_START_S, _TURN_S = 60.0, 3600.0
_SERVICE = "/org.interconnection.link.ReceiverService/Push"
_KEY = re.compile(rb"[\w:>-]{1,80}")
_TRACE = re.compile(rb"written to (/tmp/psi_[\w-]+\.trace)\.")
_SYNC = re.compile(rb"(root-\d+):\d+:ALLGATHER")
_BUSY = b"p_unfinished"
# The program of an engine.
ENGINE = Path(__file__).with_name("engine.py")
_GRPC_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
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
        done = subprocess.run(_command(package), capture_output=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-I", str(ENGINE), *arguments]


class Part(NamedTuple):
    """What one party sends in a turn: the number of the engine's messages, and the bytes for
    them.
    """

    messages: int
    size: int


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
    least = 1
    while _need(max(active, passive), least) > MAX_ROWS - count_probes(MAX_ROWS):
        least += max(1, least // 16)

    def make(count: int) -> Buckets:
        return Buckets(count, _pad(_need(active, count)), _pad(_need(passive, count)))

    candidates = [make(count) for count in range(least, least + 1 + least // 4 + 4)]
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
    messages, rest = divmod(kibs, _KIBS_A_MESSAGE)

    def part(count: int, size: int) -> Part:
        return Part(count, size + _OVERHEAD * count)

    nothing = Part(0, 0)
    gather = Turn(part(1, _GATHERED), part(1, _GATHERED))
    return [
        *[gather] * 8,
        Turn(nothing, part(2, 48)),
        Turn(part(1, 4096), part(1 + messages + rest, 4096 + kibs * _KIB)),
        Turn(
            part(_TREES + 1, _TREES * transfers + _TREE_CHECK),
            part(math.ceil(encoded / _PIECE), encoded),
        ),
        # The receiver tells the sender which of its rows are common, four bytes each.
        Turn(part(2, hash_bytes * sender), part(2, 4 * min(receiver, sender))),
        *[gather] * 3,
    ]


class Message(NamedTuple):
    """A message of an engine: the name of its step and its content."""

    key: bytes
    value: bytes


def pack(messages: Sequence[Message], part: Part) -> bytes:
    """Returns the messages of a turn, padded to its size. Raises InputError if they do not fit."""
    data = bytearray()
    for key, value in messages:
        data += len(key).to_bytes(1, "little") + len(value).to_bytes(4, "little") + key + value
    if len(data) > part.size:
        raise InputError(
            Code.DATA_INVALID,
            f"rr22: the engine sent {len(data):,} bytes in a turn of {part.size:,}. Set "
            'rows.psi.engine = "x25519", and report this error.',
        )
    return bytes(data.ljust(part.size, b"\0"))


def unpack(data: bytes, part: Part, party: str) -> list[Message]:
    """Returns the messages of a peer's turn. Raises PeerError, which names ``party``, if they are
    malformed.
    """
    messages, position = [], 0
    for _ in range(part.messages):
        key_end = position + 5 + data[position] if position < len(data) else 0
        end = key_end + int.from_bytes(data[position + 1 : position + 5], "little")
        key = data[position + 5 : key_end]
        if not 0 < end <= len(data) or _KEY.fullmatch(key) is None:
            raise _malformed(party)
        messages.append(Message(key, data[key_end:end]))
        position = end
    if any(data[position:]):
        raise _malformed(party)
    return messages


def _malformed(party: str) -> PeerError:
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
        self._rank, self._peer, self._log = rank, peer, source.with_suffix(".log")
        self._arguments = (str(source), str(result))
        self._changed = threading.Condition()
        # {number: message} of messages from the engine that came before an earlier one; None: a
        # message that the relay has answered.
        self._early: dict[int, Message | None] = {}
        self._next = 1
        self._leaving: deque[Message] = deque()
        self._delivered = self._port = 0
        # {context of a synchronisation: the name of its last round}.
        self._finished: dict[bytes, bytes] = {}
        self._done = False
        self._push: grpc.UnaryUnaryMultiCallable | None = None

    def __enter__(self) -> Self:
        scratch = str(self._log.parent)
        with contextlib.ExitStack() as opened:
            threads = opened.enter_context(ThreadPoolExecutor(4, "rr22"))
            server = grpc.server(threads, handlers=(_Relay(self._take),), options=_GRPC_OPTIONS)
            relay = server.add_insecure_port("127.0.0.1:0")
            server.start()
            opened.callback(lambda: server.stop(None).wait())
            log = opened.enter_context(self._log.open("wb"))
            command = _command(_find_package(), str(self._rank), str(relay), *self._arguments)
            self._process = opened.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=scratch,
                    # The engine writes temporary files.
                    env={"TMPDIR": scratch},
                )
            )
            opened.callback(self._process.kill)
            reader = threading.Thread(target=self._read_output, daemon=True)
            reader.start()
            self._wait(lambda: self._port > 0, _START_S)
            channel = grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_GRPC_OPTIONS)
            opened.callback(channel.close)
            with self._changed:
                self._push = channel.unary_unary(_SERVICE)
                self._changed.notify_all()
            self._opened = opened.pop_all()
        return self

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
            self._hand_over(b"connect_%d" % (1 - self._rank), b"", number=0)
        # Acknowledgements matter to a link that closes, and this one is killed.
        if name.startswith(b"connect_") or not digits:
            return
        sync = _SYNC.fullmatch(name)
        is_busy = sync is not None and value == _BUSY
        with self._changed:
            message = None if is_busy else Message(name, value)
            if sync is not None and not is_busy:
                self._finished[sync[1]] = name
                # Parties may differ in the number of rounds.
                message = Message(sync[1] + b":1:ALLGATHER", value)
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
        self._send(name + b"\x01\x02%d" % number, value)

    def _send(self, key: bytes, value: bytes) -> None:
        push = self._push
        if push is None:
            raise InternalError("rr22: the relay has no channel to its engine")
        request = b"\x08\x01" if self._rank == 0 else b""
        for tag, field in ((b"\x12", key), (b"\x1a", value)):
            request += tag + _encode_size(len(field)) + field
        try:
            push(request, timeout=_START_S, wait_for_ready=True)
        except grpc.RpcError:
            raise self._failure() from None

    def _read_output(self) -> None:
        for line in self._process.stdout or ():
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

    def _failure(self) -> PeerError:
        """Returns the error of an engine that ended, or that waits too long."""
        code = self._process.poll()
        ending = "did not answer" if code is None else f"ended with {code}"
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        last = next((line for line in reversed(lines) if "what" in line or "rror" in line), "")
        return PeerError(
            Code.MALFORMED_MESSAGE,
            f"{self._peer}: the alignment with it failed, because the engine rr22 {ending}. Begin "
            'a new run, or set rows.psi.engine = "x25519".',
            party=self._peer,
        ).privately(
            f"{self._peer}: the alignment with it failed, because the engine rr22 {ending}: "
            f'{last[:300]}. Begin a new run, or set rows.psi.engine = "x25519".'
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
