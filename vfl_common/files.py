"""Writes files so that a process that dies leaves the old file or the new one, never half of one.

Checkpoints (``checkpoint.py``) and ``run.json``, without which they are of no use, must also
survive a power failure. Waiting for the disk costs milliseconds, so the files that are written
often do not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vfl_common.errors import Code, InputError, UnwritableError

# Of a file that grows with the run: full, it gets ``.1`` at the end of its name.
MOST_BYTES = 50_000_000
# The number of full ones that are kept; ``.1`` is the newest.
OLDER = 5

# A run's or checkpoint's name: no path.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


# More than a line of the record of a question about some hundred ids.
_TRIAL_BYTES = 1 << 16
# Between two trials of a full disk.
_TRY_AGAIN_S = 1.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_full(error: OSError) -> bool:
    """Whether a write has failed because there was no room for it."""
    return error.errno in _FULL


def unwritable(
    path: Path, error: OSError, what: str = "cannot be written", code: Code = Code.FILE_INVALID
) -> InputError:
    """Words a failed write in one sentence, with what to do if the disk is full. Peers do not learn
    the path.
    """
    if not is_full(error):
        return InputError(code, f"{path}: {what} ({error.strerror})")
    text = (
        f"{path}: {what} ({error.strerror}); free some disk space, then restart the processes "
        "that stopped"
    )
    return UnwritableError(code, f"its files cannot be written ({error.strerror})").privately(text)


def require_folder(path: Path) -> None:
    """Makes the folder that a person wants files in, if it is missing. Raises InputError about
    ``out`` if it cannot.
    """
    try:
        if path.exists() and not path.is_dir():
            raise InputError(Code.FILE_INVALID, f"out: {path} is a file; give a folder")
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.errno in _FULL:
            raise unwritable(path, error) from None
        text = f"out: {path} is no folder in which files can be made ({error.strerror})"
        raise InputError(Code.FILE_INVALID, f"{text}; give another") from None


def require_room(folder: Path, room: int = 0) -> Path:
    """Writes a small file in a folder, or in the nearest one above it that exists, and removes it.
    Returns that folder. Raises InputError if it cannot be written, or if the file system has less
    than ``room`` bytes.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        if shutil.disk_usage(folder).free < room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(folder, error) from None
    return folder


def await_room(
    folders: Iterable[Path], wait_s: float, say: Callable[[str], None], room: int = 0
) -> None:
    """Returns once all folders have room for a file of ``room`` bytes, as ``require_room`` tests
    it; ``say`` gets one sentence if that takes time. Raises UnwritableError after ``wait_s``.
    """
    by_s, quiet = time.monotonic() + wait_s, True
    for folder in dict.fromkeys(folders):
        while True:
            try:
                require_room(folder, room)
                break
            except UnwritableError as error:
                if time.monotonic() >= by_s:
                    raise
                if quiet:
                    quiet = False
                    say(f"{error}; this process waits {wait_s:.0f} s for space")
            time.sleep(_TRY_AGAIN_S)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces ``path`` with ``text``; the folder must exist. Raises InputError (FILE_INVALID) if
    that fails.

    ``durable``: returns when the text is on the disk, so that a power failure cannot leave an empty
    file.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            fsync_folder(path.parent)
    except OSError as error:
        # The first error is the one to report.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(path, error) from None


def write_private(path: Path, text: str) -> None:
    """Replaces ``path`` with ``text``, which only its owner may read, also while it is written.
    Raises InputError (FILE_INVALID) if that fails.
    """
    with private_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file, which only its owner may read; at the end of the block it replaces
    ``path``, on the disk.

    If the block fails, ``path`` stays as it was. Raises InputError (FILE_INVALID) if the file
    cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A killed process may have had this number.
        temporary.unlink(missing_ok=True)
        with os.fdopen(
            os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "wb"
        ) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    except BaseException as error:
        # The first error is the one to report.
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise unwritable(path, error) from None
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits until no other program is in such a block for the same folder. Raises InputError if the
    folder cannot be opened.
    """
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        # A file system without locks has one writer, as with runs.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def kept_secret(path: Path, own: bytes) -> bytes:
    """Returns the secret that is in a file; writes ``own`` into it if there is none, and returns
    that.

    Only the owner may read the file, and it is on the disk. Raises InputError if it cannot be read
    or written, or holds another number of bytes.
    """
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        with private_file(path) as file:
            file.write(own)
        return own
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}); make it readable"
        ) from None
    if len(kept) != len(own):
        raise InputError(
            Code.FILE_INVALID, f"{path}: has {len(kept)} bytes, not {len(own)}; restore it"
        )
    return kept


def fsync_folder(folder: Path) -> None:
    """Returns when the names in ``folder`` are on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, text: str) -> None:
    """Appends ``text`` to ``path``, which is created if missing. Raises InputError (FILE_INVALID)
    if that fails.

    A full file gets ``.1`` at the end of its name, older ones the next number; the oldest is
    removed.
    """
    try:
        if path.is_file() and path.stat().st_size + len(text) > MOST_BYTES:
            _make_room(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise unwritable(path, error) from None


def _make_room(path: Path) -> None:
    """Renames a full file and the older ones; if that fails, the caller goes on in the same
    file.
    """
    names = part_names(path)
    with contextlib.suppress(OSError):
        for number in range(OLDER, 0, -1):
            if names[number - 1].is_file():
                names[number - 1].replace(names[number])


def part_names(path: Path) -> list[Path]:
    """Returns the names that a file which grows with the run, and its older parts, can have: the
    newest first.
    """
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, OLDER + 1))]


def read_lines(path: Path) -> list[str]:
    """Returns the lines of ``path`` and of its older parts, the oldest first. Raises OSError."""
    parts = [part for part in reversed(part_names(path)) if part.is_file()]
    return [line for part in parts for line in part.read_text(encoding="utf-8").splitlines()]


@dataclass
class Growing:
    """Reads a file that another process appends to, and its older parts, as they grow.

    ``path``: as in ``append``. ``most``: of what was written before the first reading, the last
    bytes that are read; None: all.
    """

    path: Path
    most: int | None = None
    # The inode of the file that was read last: its name changes when it is full.
    _part: int = 0
    _offset: int = 0

    def new(self) -> Iterator[tuple[bytes, float]]:
        """Yields (new complete lines, time of writing) of each file, the oldest first. Raises
        OSError, FileNotFoundError if there is no file.
        """
        with contextlib.ExitStack() as stack:
            files = {}
            # From the newest: a file that is renamed meanwhile comes again, and none is missed.
            for part in part_names(self.path):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(part.open("rb"))
                    files[os.fstat(file.fileno()).st_ino] = file
            if not files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            inodes = [*reversed(files)]
            if self._part in files:
                inodes = inodes[inodes.index(self._part) :]
            elif self.most is not None:
                inodes = inodes[-1:]
            for inode in inodes:
                file = files[inode]
                if inode != self._part:
                    size = os.fstat(file.fileno()).st_size
                    self._offset = 0 if self.most is None else max(0, size - self.most)
                    self._part = inode
                file.seek(self._offset)
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._offset += len(whole)
                yield whole, os.fstat(file.fileno()).st_mtime

    def replaced(self) -> bool:
        """Whether the file that was read last is gone, or is shorter than what was read of it."""
        for part in part_names(self.path) if self._part else ():
            with contextlib.suppress(OSError):
                found = part.stat()
                if found.st_ino == self._part:
                    return found.st_size < self._offset
        return self._part != 0
