"""The ledger: the counts of bytes that a process sends and receives, by peer, phase, kind and
direction.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic, write_error

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
