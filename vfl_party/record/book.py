"""The append-only file of a record, and the hashes of the Merkle tree over its lines.

A line is written with one system call before the bundle that it describes is sent. If the process
is killed, the kernel keeps the line. If the disk loses power, the last second may be lost, because
the file is synced once a second and before each head is signed. Several programs of the party may
write at the same time; each locks the file while it appends a line.

If the process is killed during a write, the last line may be incomplete. Nothing was sent for such
a line, and the next process that appends a line truncates it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import load_or_create_secret, write_atomic, write_error
from vfl_common.text import to_json
from vfl_party.record import tree
from vfl_party.record.note import RecordHead

LINES, HASHES, STATE, SECRET = "lines.jsonl", "hashes", "hashes.json", "people.secret"
_SECRET_BYTES = 32
_SYNC_S = 1.0
_PROBLEM = "cannot be written, and nothing leaves without a record"
# The number of bytes that are read at once.
_CHUNK = 1 << 22


def folder_of(out: Path, name: str) -> Path:
    """Returns the folder of a party's record, next to the folders of its runs."""
    return out / f".record-{name}"


class RecordBook:
    """Appends lines to one party's record. Any thread may call it.

    Args:
        folder: The folder of the record. It is created if it is missing, and only its owner may
            read it.
        name: The party's name.

    Raises InputError if the folder cannot be used, or if it has another party's record.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.path, self.name = folder, folder / LINES, name
        self._mutex = threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self.path, flags, 0o600)
            self._hashes = os.open(folder / HASHES, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise write_error(self.path, error) from None
        # ``_end`` is the offset after the last complete line that this process knows.
        self._end, self._dirty, self._closed = -1, False, threading.Event()
        self._failed: OSError | None = None
        with self._lock():
            self.is_new = os.fstat(self._file).st_size == 0
            if self.is_new:
                # Only the program that has the lock creates the key. Tags of another key would
                # match nobody.
                key = load_or_create_secret(folder / SECRET, secrets.token_bytes(_SECRET_BYTES))
                identity = {
                    "record": secrets.token_hex(16),
                    "party": name,
                    "key": _fingerprint(key),
                }
                self._write(f"{to_json({**identity, 'at': now()}, compact=True)}\n".encode())
        self.origin = _read_origin(self.path, name)
        self.secret = secret_of(folder)
        self._sync_thread = threading.Thread(
            target=self._sync_periodically, name="record", daemon=True
        )
        self._sync_thread.start()

    def add(self, **fields: Any) -> None:
        """Appends a line. After this call, the data that the line describes may be sent.

        Raises InputError if the line cannot be written.
        """
        self.add_line(to_json({**fields, "at": now()}, compact=True))

    def add_line(self, text: str) -> tuple[int, int]:
        """Appends a line that is already JSON; see ``add``.

        Returns the offsets where the line begins and ends in the file.
        """
        line, file = f"{text}\n".encode(), self._file
        # This does the same as ``_lock`` with fewer calls, because it runs at every step.
        with self._mutex:
            try:
                if self._failed is not None:
                    raise self._failed
                if self._closed.is_set():
                    # The file descriptor may already belong to another file.
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    self._write(line)
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)
            except OSError as error:
                raise write_error(self.path, error, _PROBLEM) from None
            return self._end - len(line), self._end

    def head(self) -> RecordHead:
        """Syncs the file, and returns the head of all lines. Raises InputError if this fails."""
        with self._lock():
            self._truncate_incomplete_line(os.fstat(self._file).st_size)
            # This also syncs lines that other programs of the party wrote.
            os.fdatasync(self._file)
            size, time_s = self._grow_tree()
            return RecordHead(self.origin, size, tree.root(size, self._hash_at), time_s)

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Returns the proof that the first ``new`` lines begin with the first ``old`` lines.

        Both numbers are former or present sizes of the record; see ``tree.consistency``.
        """
        with self._lock():
            return tree.consistency(old, new, self._hash_at)

    def inclusion(self, number: int, size: int) -> list[bytes]:
        """Returns the proof that line ``number`` is in the tree of the first ``size`` lines."""
        with self._lock():
            return tree.inclusion(number, size, self._hash_at)

    def close(self) -> None:
        """Syncs all lines to the disk and closes the files."""
        self._closed.set()
        self._sync_thread.join()
        with self._mutex:
            with contextlib.suppress(OSError):
                self._sync()
            os.close(self._file)
            os.close(self._hashes)

    # -- the file
    # ----------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with self._mutex:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            except OSError as error:
                raise write_error(self.path, error, _PROBLEM) from None
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, line: bytes) -> None:
        # lseek returns the end of the file in half the time of fstat.
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size != self._end:
            size = self._truncate_incomplete_line(size)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._end, self._dirty = size + len(line), True

    def _truncate_incomplete_line(self, size: int) -> int:
        """Truncates an incomplete last line, and returns the new end of the file."""
        end = size
        while end > 0:
            begin = max(0, end - _CHUNK)
            newline = os.pread(self._file, end - begin, begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            os.ftruncate(self._file, end)
        self._end = end
        return end

    def _sync(self) -> None:
        if self._dirty:
            self._dirty = False
            os.fdatasync(self._file)

    def _sync_periodically(self) -> None:
        while not self._closed.wait(_SYNC_S):
            if not self._dirty:
                continue
            self._dirty = False
            try:
                os.fdatasync(self._file)
            except OSError as error:
                # Earlier lines may be lost, so the next call of ``add`` raises this error.
                self._failed = error

    # -- the tree
    # ----------------------------------------------------------------------

    def _hash_at(self, place: int) -> bytes:
        return os.pread(self._hashes, tree.HASH_BYTES, place * tree.HASH_BYTES)

    def _grow_tree(self) -> tuple[int, int]:
        """Adds the hashes of new lines. Returns the number of lines and the time of their head."""
        lines, offset_in_lines, head_time_s = self._read_state()
        stored_counts = [tree.count_hashes(lines)]
        os.ftruncate(self._hashes, stored_counts[0] * tree.HASH_BYTES)
        new_hashes: list[bytes] = []

        def hash_at(place: int) -> bytes:
            return (
                new_hashes[place - stored_counts[0]]
                if place >= stored_counts[0]
                else self._hash_at(place)
            )

        for line in lines_from(self._file, offset_in_lines, self._end):
            new_hashes += tree.hashes_of_leaf(tree.leaf_hash(line), lines, hash_at)
            lines, offset_in_lines = lines + 1, offset_in_lines + len(line) + 1
        data = memoryview(b"".join(new_hashes))
        offset = stored_counts[0] * tree.HASH_BYTES
        while data:
            written = os.pwrite(self._hashes, data, offset)
            data, offset = data[written:], offset + written
        # The hashes must be on the disk before the file that says how many there are.
        os.fdatasync(self._hashes)
        # If the clock was set back, the time of a larger head must still not be earlier. Peers
        # would treat that as evidence of a changed record.
        head_time_s = max(head_time_s, int(now()))
        write_atomic(
            self.folder / STATE,
            to_json({"lines": lines, "bytes": offset_in_lines, "at": head_time_s}),
        )
        return lines, head_time_s

    def _read_state(self) -> tuple[int, int, int]:
        """Returns the number of hashed lines, the offset of their end, and the last head's time."""
        try:
            state = json.loads((self.folder / STATE).read_text())
            lines, offset, head_time_s = (
                int(state["lines"]),
                int(state["bytes"]),
                int(state.get("at", 0)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0, 0, 0
        stored_count = os.fstat(self._hashes).st_size // tree.HASH_BYTES
        fits = 0 <= offset <= self._end and tree.count_hashes(lines) <= stored_count
        return (lines, offset, head_time_s) if fits else (0, 0, head_time_s)


def now() -> float:
    """Returns the current time for a line: seconds since 1970, rounded to milliseconds."""
    return round(time.time(), 3)


def lines_from(file: int, at: int, end: int) -> Iterator[bytes]:
    """Yields the lines between two offsets of a file, without newlines.

    ``file`` is a file descriptor, and ``at`` and ``end`` are offsets in bytes.
    """
    incomplete = b""
    while at < end:
        chunk = os.pread(file, min(_CHUNK, end - at), at)
        if not chunk:
            return
        at += len(chunk)
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from lines


def secret_of(folder: Path) -> bytes:
    """Returns the key with which a record computes the tags of people.

    Raises InputError if the key cannot be read, or if it is not the key of this record.
    """
    path = folder / SECRET
    try:
        key = path.read_bytes()
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Restore it from a copy."
        ) from None
    # Records of earlier versions have no fingerprint of the key.
    fingerprint = _read_first_line(folder / LINES).get("key", _fingerprint(key))
    if len(key) != _SECRET_BYTES or fingerprint != _fingerprint(key):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not the key with which this record was created. Restore it from a copy.",
        )
    return key


def _fingerprint(key: bytes) -> str:
    """Returns the fingerprint of a key, which the first line of a record has."""
    return sha256(key).hexdigest()[:32]


def _read_first_line(path: Path) -> dict[str, Any]:
    """Returns the first line of a record. Raises InputError if it is invalid."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.readline())
        return {**fields, "record": str(fields["record"]), "party": str(fields["party"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a valid record. Restore it, or move its folder away.",
        ) from None


def _read_origin(path: Path, name: str) -> str:
    """Returns the name of a record that its signed notes have.

    Raises InputError if its first line is invalid, or if the record belongs to another party.
    """
    first = _read_first_line(path)
    identity, party = first["record"], first["party"]
    if party != name:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: this is the record of another party (got {party}, not {name}). Set a "
            "separate folder for each party.",
        )
    return f"vfl-record/{party}/{identity}"
