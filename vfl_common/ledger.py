"""The ledger: each process counts the bytes that it sends and receives, by peer, phase, kind and
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
# The phase and kind of the runner's own exchanges.
CONTROL = "control"
# The largest count in a file; a party's report has 64 bits for a count.
_MAX_COUNT = 2**62


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: the bytes sent to ``peer`` or received from it."""

    peer: str
    phase: str
    kind: str
    direction: Direction
    # The raw tensor data.
    payload_bytes: int
    # The serialised protobuf messages; gRPC's 5-byte prefix, HTTP/2 and TLS come on top.
    message_bytes: int
    messages: int


@dataclass(frozen=True, slots=True)
class TcpCount:
    """The kernel's count on the connections to ``peer``: with TLS and HTTP/2, without TCP/IP
    headers.
    """

    peer: str
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class InterfaceCount:
    """The kernel's count on a network interface while the program ran: all programs, headers of
    every layer.
    """

    interface: str
    sent_bytes: int
    received_bytes: int


def fields_of(line: Entry | TcpCount | InterfaceCount) -> dict[str, Any]:
    """Returns a line's fields; ``asdict`` copies them recursively, and takes ten times as long."""
    return {name: getattr(line, name) for name in line.__slots__}


class Ledger:
    """Counts bytes and messages. It is thread-safe, because gRPC's threads count, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The three counts are payload bytes, message bytes and messages.
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
        """Counts one message, or several at once."""
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
        """Returns all lines so far, sorted."""
        with self._lock:
            return [Entry(*key, *count) for key, count in sorted(self._counts.items())]

    def save(self, path: Path, tcp: Iterable[TcpCount] = ()) -> None:
        """Writes ``{"entries": […], "tcp": […]}`` atomically."""
        # Laid out like json.dumps(…, indent=1), which is not written in C, and slow.
        entries = ",\n ".join(json.dumps(fields_of(entry)) for entry in self.entries())
        counts = ",\n ".join(json.dumps(fields_of(count)) for count in tcp)
        text = f'"entries": [\n {entries}\n],\n"tcp": [\n {counts}\n]'
        write_atomic(path, f"{{{text}}}\n")


def read_entries(path: Path) -> list[Entry]:
    """Reads the entries of a saved ledger. Raises InputError (FILE_INVALID) if that fails."""
    try:
        return [
            _entry(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: is not a readable ledger. Restore or remove the file."
        ) from None


def load_entries(path: Path) -> list[Entry]:
    """Reads the entries of a saved ledger, to go on counting from them; returns none if the file
    does not exist.

    A damaged ledger does not end a run: it is renamed to ``ledger.json.damaged``.
    """
    if not path.exists():
        return []
    try:
        return read_entries(path)
    except InputError as error:
        aside = path.with_name(f"{path.name}.damaged")
        try:
            path.replace(aside)
        except OSError as refused:
            raise write_error(path, refused, "is a damaged ledger, and cannot be renamed") from None
        log.warning(
            "%s It was renamed to %s; the counts restart at 0.",
            error,
            aside.name,
            extra={"event": "damaged"},
        )
        return []


def _entry(peer: str, phase: str, kind: str, direction: Direction, **counts: int) -> Entry:
    """Returns an entry of a file. Raises TypeError or ValueError if ``Ledger.save`` cannot have
    written it.
    """
    entry = Entry(peer, phase, kind, direction, **counts)
    names = (peer, phase, kind)
    if not all(isinstance(name, str) for name in names) or direction not in get_args(Direction):
        raise ValueError(entry)
    if not all(type(count) is int and 0 <= count <= _MAX_COUNT for count in counts.values()):
        raise ValueError(entry)
    return entry
