"""Bundles: named tensors that an exchange sends from one process to another; the specs that check
them; ``Link`` and ``Hub``, the two sides of an exchange, which ``rpc`` implements over gRPC; and
the ledger, which counts the bytes by peer, phase, kind and direction.

This module does not use torch: a tensor is a dtype, a shape and a contiguous little-endian buffer.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import write_atomic, write_error

# Numbers above this limit are suspect: their squares approach the limit of float32.
HUGE = 1e18


class DType(IntEnum):
    """The dtype of a tensor. Names and numbers are the same as in ``vfl.v1.DType``."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT64 = 4
    INT32 = 5
    UINT8 = 6
    BOOL = 7


ITEM_BYTES: dict[DType, int] = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class Kind(IntEnum):
    """The kind of a bundle's content. Names and numbers are the same as in
    ``vfl.v1.BundleKind``.
    """

    EMBEDDING = 1
    GRADIENT = 2
    WEIGHTS = 3
    ROWS = 4
    VERDICT = 5
    ACK = 6

    @property
    def label(self) -> str:
        """The name of this kind in the ledger."""
        return LABELS[self]


LABELS: dict[int, str] = {kind: kind.name.lower() for kind in Kind}


class StepKey(NamedTuple):
    """Identifies a step within a run; a step that is sent again is computed only once."""

    phase: str
    round: int
    batch: int

    def __str__(self) -> str:
        return f"phase {self.phase}, round {self.round}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor. ``data`` is a flat, contiguous view of its bytes."""

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors of one kind, in the order in which they cross the wire."""

    kind: Kind
    tensors: Mapping[str, Buffer] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(buffer.data.nbytes for buffer in self.tensors.values())

    def spec(self) -> BundleSpec:
        """Returns the spec that this bundle matches."""
        tensors = {name: TensorSpec(t.dtype, t.shape) for name, t in self.tensors.items()}
        return BundleSpec(self.kind, tensors)


@dataclass(frozen=True)
class TensorSpec:
    """The exact dtype and shape of one tensor of a bundle."""

    dtype: DType
    shape: tuple[int, ...]

    # Cached, because every step uses it.
    @cached_property
    def nbytes(self) -> int:
        """The size of the tensor, in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()} {list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class BundleSpec:
    """The exact kind, names, dtypes and shapes of a bundle. They are checked when the bundle is
    announced, before memory is allocated for its bytes.

    A spec equals only itself, so that caches can use its identity as a key.
    """

    kind: Kind
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def check(
        self, kind: Kind, announced: Mapping[str, TensorSpec], *, party: str, step: StepKey
    ) -> None:
        """Raises PeerError (TENSOR_MISMATCH, TENSOR_TOO_LARGE) if ``announced`` differs from this
        spec.
        """
        if kind is self.kind and announced == self.tensors:
            return

        if sum(spec.nbytes for spec in announced.values()) > self.payload_bytes:
            raise _mismatch(
                Code.TENSOR_TOO_LARGE,
                f"{party} at {step}: a message must have at most {self.payload_bytes} bytes (got "
                f"{sum(spec.nbytes for spec in announced.values())})",
                party,
            )
        if kind is not self.kind:
            raise _mismatch(
                Code.TENSOR_MISMATCH,
                f"{party} at {step}: the kind must be {self.kind.label} (got {kind.label})",
                party,
            )
        for name in [*self.tensors, *announced]:
            expected_spec, announced_spec = self.tensors.get(name), announced.get(name)
            if expected_spec != announced_spec:
                raise _mismatch(
                    Code.TENSOR_MISMATCH,
                    f"{party} at {step}: tensor {name[:40]!r} must be "
                    f"{expected_spec or 'absent'} (got {announced_spec or 'nothing'})",
                    party,
                )


def _mismatch(code: Code, message: str, party: str) -> PeerError:
    # Both sides have agreed on names and shapes, so the peer may read them.
    return PeerError(code, message, party=party)


# The version of the protocol between parties and server. Increase it with any change that an older
# peer would misread, and declare it in the method or alignment that changed (``Method.protocol``).
PROTOCOL = 8
# The oldest protocol version that this release supports: that of the previous release.
OLDEST = PROTOCOL - 1


@dataclass(frozen=True)
class Lenience:
    """Lets a step go on without parties that are late or away.

    A party whose bundle has not arrived after ``deadline_s`` seconds is away, and later steps do
    not wait for it. When it sends a bundle for a past step, it is told the current step and takes
    part again. Steps then wait for it again, unless it is late too often: see ``Patience`` in
    ``vfl_common.rpc.exchange.hub``.

    ``at_least``: the minimum number of parties that a step needs. For these the deadline does not
    apply.
    """

    deadline_s: float
    at_least: int = 0


class StepPassed(Exception):  # noqa: N818 - an event of the run, not a fault
    """A step was computed without this party. ``now``: the current step."""

    def __init__(self, now: StepKey) -> None:
        super().__init__(f"the step has passed; {now} is under way")
        self.now = now


class Link(Protocol):
    """The asking side of an exchange: call ``swap``, or ``send`` and later ``receive`` to do other
    work meanwhile.

    Several bundles may be in flight, up to the hub's ``in_flight``: ``send`` may be called for
    later steps before ``receive`` is called for the first one. Replies come in the order in which
    the bundles were sent.
    """

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        """Calls ``send``, then ``receive``."""
        self.send(step, bundle)
        return self.receive(step, expect)

    def send(self, step: StepKey, bundle: Bundle) -> None:
        """Sends ``bundle``, which is encoded before this method returns. A step that is sent again
        is computed only once.

        Raises InterruptedRun if this generation has ended.
        """
        ...

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        """Waits for the reply to ``step``, the oldest step without a reply.

        Raises PeerError if the reply does not match ``expect``, InterruptedRun if this generation
        has ended, LostError if the peer takes longer than the recipe's ``run.step_timeout_s``,
        StepPassed if the peer has computed the step without this party (see ``Lenience``).
        """
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next reply: the peer may be training alone."""
        ...


class Hub(Protocol):
    """The computing side of an exchange. Steps follow one another strictly: collect, reply,
    collect, reply, …

    A hub accepts up to ``in_flight`` bundles of one party. Bundles of later steps wait until their
    step is collected.
    """

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec | Mapping[str, BundleSpec],
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
        lenience: Lenience | None = None,
    ) -> dict[str, Bundle]:
        """Waits until every party has sent its bundle for ``step``. Returns {party: bundle}, in
        roster order.

        ``expect``: the spec of every party's bundle, or {party: spec}. A party without an entry
        sends nothing at this step, and may be at a later step already. ``arrived`` is called in
        this thread with each bundle as soon as it arrives. Bundles that are incomplete after
        ``deadline_s`` are left out; their parties get a reply when the bundle arrives. With
        ``lenience``, late parties get no reply but are told the current step.

        Raises PeerError if a bundle does not match ``expect``, InterruptedRun if this generation
        has ended, LostError if a party takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        """Sends every party its reply for ``step``, and returns at once. A late party gets its
        reply when its bundle arrives.

        With ``lenience`` only the parties whose bundle arrived in time get a reply.
        """
        ...

    def ask_again(self, step: StepKey) -> None:
        """Lets a returning party prove that its rows are unchanged: the party must repeat, at
        ``step``, its bundle of the current step.

        The party is then told the current step. If its bundle differs, the next ``collect`` raises
        PeerError.
        """
        ...

    def settle(self) -> None:
        """Ends a phase with ``lenience``: waits until each party that is away has returned and was
        told that the phase is over.

        Raises InterruptedRun if this generation has ended, LostError after ``run.step_timeout_s``.
        """
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next ``collect``: the parties may be training alone."""
        ...


log = logging.getLogger(__name__)
Direction = Literal["sent", "received"]
# The phase and the kind under which the runner's own messages are counted.
CONTROL = "control"
# The largest count in a file, because a party's report has 64 bits for a count.
_MAX_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class Entry:
    """The counts of one kind of messages to or from ``peer`` in one phase."""

    peer: str
    phase: str
    kind: str
    direction: Direction
    # The bytes of the raw tensor data.
    payload_bytes: int
    # The bytes of the serialised protobuf messages, without gRPC's 5-byte prefix, HTTP/2 and TLS.
    message_bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class TcpCount:
    """The kernel's byte counts for the connections to ``peer``, including TLS and HTTP/2 but not
    TCP/IP headers.
    """

    peer: str
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class InterfaceCount:
    """The kernel's byte counts for a network interface while the program ran. They include the
    traffic of all programs and the headers of every layer.
    """

    interface: str
    sent_bytes: int
    received_bytes: int


def get_fields(line: Entry | TcpCount | InterfaceCount) -> dict[str, Any]:
    """Returns {field: value} of a count. It is ten times as fast as ``asdict``, which copies
    recursively.
    """
    return {name: getattr(line, name) for name in line.__slots__}


class Ledger:
    """Counts bytes and messages. It is thread-safe, because gRPC's threads also count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The list has three counts: payload bytes, message bytes and messages.
        self._counts: dict[tuple[str, str, str, Direction], list[int]] = {}

    def add(
        self,
        peer: str,
        phase: str,
        kind: str,
        direction: Direction,
        payload_bytes: int,
        message_bytes: int,
        messages: int = 1,
    ) -> None:
        """Counts one message, or several messages of the same kind."""
        key = (peer, phase, kind, direction)
        with self._lock:
            count = self._counts.get(key)
            if count is None:
                count = self._counts[key] = [0, 0, 0]
            count[0] += payload_bytes
            count[1] += message_bytes
            count[2] += messages

    def carry(self, entries: Iterable[Entry]) -> None:
        """Adds the counts of an earlier process of the same party in the same run."""
        with self._lock:
            for entry in entries:
                count = self._counts.setdefault(
                    (entry.peer, entry.phase, entry.kind, entry.direction), [0, 0, 0]
                )
                count[0] += entry.payload_bytes
                count[1] += entry.message_bytes
                count[2] += entry.messages

    def entries(self) -> list[Entry]:
        """Returns all counts so far, sorted by peer, phase, kind and direction."""
        with self._lock:
            return [Entry(*key, *count) for key, count in sorted(self._counts.items())]

    def save(self, path: Path, tcp: Iterable[TcpCount] = ()) -> None:
        """Writes ``{"entries": […], "tcp": […]}`` atomically."""
        # The layout is that of json.dumps(…, indent=1), which is slow because its encoder is not
        # written in C.
        entries = ",\n ".join(json.dumps(get_fields(entry)) for entry in self.entries())
        counts = ",\n ".join(json.dumps(get_fields(count)) for count in tcp)
        text = f'"entries": [\n {entries}\n],\n"tcp": [\n {counts}\n]'
        write_atomic(path, f"{{{text}}}\n")


def read_entries(path: Path) -> list[Entry]:
    """Reads the entries of a saved ledger. Raises InputError (FILE_INVALID) if the file is not
    readable.
    """
    try:
        return [
            _check_entry(**entry)
            for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: is not a readable ledger. Restore or remove the file."
        ) from None


def load_entries(path: Path) -> list[Entry]:
    """Reads the entries of a saved ledger, to continue its counts. Returns an empty list if the
    file does not exist.

    A damaged ledger does not end a run: it is renamed to ``ledger.json.damaged``.
    """
    if not path.exists():
        return []
    try:
        return read_entries(path)
    except InputError as error:
        damaged_path = path.with_name(f"{path.name}.damaged")
        try:
            path.replace(damaged_path)
        except OSError as rename_error:
            raise write_error(
                path, rename_error, "is a damaged ledger, and cannot be renamed"
            ) from None
        log.warning(
            "%s It was renamed to %s; the counts restart at 0.",
            error,
            damaged_path.name,
            extra={"event": "damaged"},
        )
        return []


def _check_entry(peer: str, phase: str, kind: str, direction: Direction, **counts: int) -> Entry:
    """Checks an entry of a file. Raises TypeError or ValueError if ``Ledger.save`` cannot have
    written it.
    """
    entry = Entry(peer, phase, kind, direction, **counts)
    names = (peer, phase, kind)
    if not all(isinstance(name, str) for name in names) or direction not in get_args(Direction):
        raise ValueError(f"peer, phase, kind or direction is not valid (got {entry})")
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts.values()):
        raise ValueError(f"a count must be an integer from 0 to {_MAX_COUNT} (got {entry})")
    return entry
