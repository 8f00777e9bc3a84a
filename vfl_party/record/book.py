"""The file of a record: lines that are only ever added, and the hashes of the tree over them.

A line is written, by one call of the system, before what it tells of is sent. The kernel keeps what
was written if the process is killed; a disk that loses power may lose the last second, so the file
is synchronised once a second, and always before a head is signed. Several programs of the party may
write at once: each holds the file's lock while it adds a line.

The kernel may end a write in its middle if the process is killed then. Nothing was sent for such a
line, and the process that adds the next one cuts it off.
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
_WHAT = "cannot be written, and nothing leaves without a record"
# The bytes that are read at once.
_CHUNK = 1 << 22


def folder_of(out: Path, name: str) -> Path:
    """Returns the folder of a party's record, next to the folders of its runs."""
    return out / f".record-{name}"


class RecordBook:
    """The lines of one party's record, open to add some; any thread may call it.

    Args:
        folder: of the record; it is made if it is missing, for its owner alone.
        name: the party's.

    Raises InputError if the folder cannot be used, or is another party's.
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
        # Where this process knows the file to end, with a whole line.
        self._end, self._dirty, self._closed = -1, False, threading.Event()
        self._failed: OSError | None = None
        with self._lock():
            self.is_new = os.fstat(self._file).st_size == 0
            if self.is_new:
                # One program at a time makes the key: tags made with another key match nobody.
                key = load_or_create_secret(folder / SECRET, secrets.token_bytes(_SECRET_BYTES))
                first = {"record": secrets.token_hex(16), "party": name, "key": _fingerprint(key)}
                self._write(f"{to_json({**first, 'at': now()}, compact=True)}\n".encode())
        self.origin = _origin(self.path, name)
        self.secret = secret_of(folder)
        self._syncing = threading.Thread(target=self._keep_synced, name="record", daemon=True)
        self._syncing.start()

    def add(self, **fields: Any) -> None:
        """Adds a line. Returns when it is written; what it tells of may leave then. Raises
        InputError if it cannot be written.
        """
        self.add_line(to_json({**fields, "at": now()}, compact=True))

    def add_line(self, text: str) -> tuple[int, int]:
        """Adds a line that is JSON already; see ``add``. Returns where it begins and ends in the
        file.
        """
        line, file = f"{text}\n".encode(), self._file
        # This is ``_lock`` in fewer calls, because it runs at every step.
        with self._mutex:
            try:
                if self._failed is not None:
                    raise self._failed
                if self._closed.is_set():
                    # The number of the file may be another file's by now.
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    self._write(line)
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)
            except OSError as error:
                raise write_error(self.path, error, _WHAT) from None
            return self._end - len(line), self._end

    def head(self) -> RecordHead:
        """Returns the head of all lines so far, which are on the disk then. Raises InputError."""
        with self._lock():
            self._require_whole(os.fstat(self._file).st_size)
            # Lines of other programs of the party are synchronised, too.
            os.fdatasync(self._file)
            size, at = self._grow_tree()
            return RecordHead(self.origin, size, tree.root(size, self._hash_at), at)

    def consistency(self, old: int, new: int) -> list[bytes]:
        """Returns the proof that the tree of ``new`` lines goes on from that of ``old``; see
        ``tree.consistency``. Both are sizes that the record has had.
        """
        with self._lock():
            return tree.consistency(old, new, self._hash_at)

    def inclusion(self, number: int, size: int) -> list[bytes]:
        """Returns the proof that a line is in the tree of ``size`` lines."""
        with self._lock():
            return tree.inclusion(number, size, self._hash_at)

    def close(self) -> None:
        """Writes all lines to the disk, and closes the files."""
        self._closed.set()
        self._syncing.join()
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
                raise write_error(self.path, error, _WHAT) from None
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _write(self, line: bytes) -> None:
        # The end of the file, in half the time of fstat.
        size = os.lseek(self._file, 0, os.SEEK_END)
        if size != self._end:
            size = self._require_whole(size)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, size)
            raise
        self._end, self._dirty = size + len(line), True

    def _require_whole(self, size: int) -> int:
        """Cuts off a line that a process could not finish; returns where the file ends then."""
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

    def _keep_synced(self) -> None:
        while not self._closed.wait(_SYNC_S):
            if not self._dirty:
                continue
            self._dirty = False
            try:
                os.fdatasync(self._file)
            except OSError as error:
                # The next call of ``add`` raises it: earlier lines may be lost.
                self._failed = error

    # -- the tree
    # ----------------------------------------------------------------------

    def _hash_at(self, place: int) -> bytes:
        return os.pread(self._hashes, tree.HASH_BYTES, place * tree.HASH_BYTES)

    def _grow_tree(self) -> tuple[int, int]:
        """Adds the hashes of the lines that are new. Returns how many lines there are, and the time
        of their head.
        """
        lines, at, headed = self._read_state()
        stored = [tree.count_hashes(lines)]
        os.ftruncate(self._hashes, stored[0] * tree.HASH_BYTES)
        new: list[bytes] = []

        def hash_at(place: int) -> bytes:
            return new[place - stored[0]] if place >= stored[0] else self._hash_at(place)

        for line in lines_from(self._file, at, self._end):
            new += tree.hashes_of_leaf(tree.leaf_hash(line), lines, hash_at)
            lines, at = lines + 1, at + len(line) + 1
        data = memoryview(b"".join(new))
        offset = stored[0] * tree.HASH_BYTES
        while data:
            written = os.pwrite(self._hashes, data, offset)
            data, offset = data[written:], offset + written
        # Otherwise a disk that loses power may keep their number but not the hashes.
        os.fdatasync(self._hashes)
        # A clock that is set back must not make a smaller head look later: peers would take that
        # for evidence.
        headed = max(headed, int(now()))
        write_atomic(self.folder / STATE, to_json({"lines": lines, "bytes": at, "at": headed}))
        return lines, headed

    def _read_state(self) -> tuple[int, int, int]:
        """Returns how many lines have their hashes, where these lines end, and the time of the last
        head.
        """
        try:
            known = json.loads((self.folder / STATE).read_text())
            lines, at, headed = int(known["lines"]), int(known["bytes"]), int(known.get("at", 0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return 0, 0, 0
        there = os.fstat(self._hashes).st_size // tree.HASH_BYTES
        fits = 0 <= at <= self._end and tree.count_hashes(lines) <= there
        return (lines, at, headed) if fits else (0, 0, headed)


def now() -> float:
    """Returns the time of a line: seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


def lines_from(file: int, at: int, end: int) -> Iterator[bytes]:
    """Yields the lines of a file between two places, without their ends."""
    rest = b""
    while at < end:
        chunk = os.pread(file, min(_CHUNK, end - at), at)
        if not chunk:
            return
        at += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def secret_of(folder: Path) -> bytes:
    """Returns the key of the tags of people in a record. Raises InputError if it cannot be read, or
    is not the key of the record.
    """
    path = folder / SECRET
    try:
        key = path.read_bytes()
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Restore it from a copy."
        ) from None
    # Records of earlier versions do not name it.
    noted = _first(folder / LINES).get("key", _fingerprint(key))
    if len(key) != _SECRET_BYTES or noted != _fingerprint(key):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not the key with which this record was created. Restore it from a copy.",
        )
    return key


def _fingerprint(key: bytes) -> str:
    """Returns what the first line names a key by; it does not tell the key."""
    return sha256(key).hexdigest()[:32]


def _first(path: Path) -> dict[str, Any]:
    """Returns the first line of a record. Raises InputError if it is none."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
        return {**first, "record": str(first["record"]), "party": str(first["party"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a record of what left. Restore it, or move its folder away.",
        ) from None


def _origin(path: Path, name: str) -> str:
    """Returns the name of a record in notes. Raises InputError if its first line is none, or of
    another party.
    """
    first = _first(path)
    identity, party = first["record"], first["party"]
    if party != name:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is the record of another party (got {party}, not {name}). Set a separate "
            "folder for each party.",
        )
    return f"vfl-record/{party}/{identity}"
