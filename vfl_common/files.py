"""Writes files atomically: after a crash, a file has either its old or its new content. Raises the
limit of open files.

Checkpoints (``checkpoint.py``) and ``run.json`` must also survive a power failure, so they are
flushed to disk. Files that are written often are not flushed, because a flush takes milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from vfl_common.errors import Code, InputError, UnwritableError

# The maximum size of a file that grows with the run. A full file is renamed: ``.1`` is appended to
# its name.
MAX_FILE_BYTES = 50_000_000
# The number of full files that are kept. The newest is ``.1``.
OLDER = 5

# The allowed names of runs and checkpoints, which cannot be paths.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


# The size of a test write, which is larger than the longest line of a record (some hundred ids).
_TRIAL_BYTES = 1 << 16
# The time between two attempts to write to a full disk.
_TRY_AGAIN_S = 1.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# The usual soft limit of open files, and the most that is useful.
_MIN_FILES, _MAX_FILES = 1024, 65_536
log = logging.getLogger(__name__)


def is_full(error: OSError) -> bool:
    """Returns whether a write has failed because the disk or a quota is full."""
    return error.errno in _FULL


def write_error(
    path: Path, error: OSError, what: str = "cannot be written", code: Code = Code.FILE_INVALID
) -> InputError:
    """Returns the error for a failed write to ``path``. Its public text, which peers see, has no
    path.
    """
    if not is_full(error):
        return InputError(
            code,
            f"{path}: {what} ({error.strerror}). Correct its permissions, or use another path.",
        )
    return UnwritableError(code, f"its files cannot be written ({error.strerror})").privately(
        f"{path}: {what} ({error.strerror}). Free some disk space, then restart the processes that "
        "stopped."
    )


def require_folder(path: Path) -> None:
    """Creates the folder for a command's files if it is missing. Raises InputError that names
    ``out`` if the folder cannot be created or written to.
    """
    try:
        if path.exists() and not path.is_dir():
            raise InputError(Code.FILE_INVALID, f"out: {path} is a file. Give a folder.")
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.errno in _FULL:
            raise write_error(path, error) from None
        raise InputError(
            Code.FILE_INVALID,
            f"out: {path} is not a writable folder ({error.strerror}). Give another folder.",
        ) from None


def require_writable(folder: Path, room: int = 0) -> Path:
    """Tests whether files can be written to a folder, or to its nearest ancestor that exists.
    Returns the tested folder. Raises InputError if a test file cannot be written, or if the file
    system has less than ``room`` free bytes.
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
        raise write_error(folder, error) from None
    return folder


def await_room(
    folders: Iterable[Path], wait_s: float, say: Callable[[str], None], room: int = 0
) -> None:
    """Waits until all folders have room for a file of ``room`` bytes, which ``require_writable``
    tests. Calls ``say`` with one sentence if it must wait. Raises UnwritableError after ``wait_s``
    seconds.
    """
    deadline_s, is_first_attempt = time.monotonic() + wait_s, True
    for folder in dict.fromkeys(folders):
        while True:
            try:
                require_writable(folder, room)
                break
            except UnwritableError as error:
                if time.monotonic() >= deadline_s:
                    raise
                if is_first_attempt:
                    is_first_attempt = False
                    say(f"{error} This process waits {wait_s:.0f} s for space.")
            time.sleep(_TRY_AGAIN_S)


def write_atomic(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces the content of ``path`` with ``text``. The folder must exist. Raises InputError
    (FILE_INVALID) if the file cannot be written.

    ``durable``: whether to flush the text to disk before returning, so that a power failure cannot
    leave an empty file.
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
        raise write_error(path, error) from None


def write_private(path: Path, text: str) -> None:
    """Replaces the content of ``path`` with ``text``. Only the owner can ever read the file. Raises
    InputError (FILE_INVALID) if the file cannot be written.
    """
    with private_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file that only its owner may read. At the end of the block the file is flushed
    to disk and replaces ``path``.

    If the block fails, ``path`` stays as it was. Raises InputError (FILE_INVALID) if the file
    cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # An earlier process with the same process id may have been killed and left the file.
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
            raise write_error(path, error) from None
        raise


def lock_file(file: int | IO[Any], *, wait: bool) -> bool:
    """Locks an open file or folder for this process, until it is closed. Returns False if another
    process holds the lock; with ``wait``, waits for it instead. Raises OSError if the file system
    has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(file: int | IO[Any]) -> Iterator[None]:
    """Waits for the lock of an open file, and holds it while the block runs. Raises OSError."""
    lock_file(file, wait=True)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder while the block runs; first waits until no other program
    holds the lock. Raises InputError if the folder cannot be opened.
    """
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise write_error(folder, error) from None
    try:
        # A file system without locks is accepted; there, users must make sure that only one process
        # writes.
        with contextlib.suppress(OSError):
            lock_file(lock, wait=True)
        yield
    finally:
        os.close(lock)


def load_or_create_secret(path: Path, own: bytes) -> bytes:
    """Returns the secret in a file. If the file does not exist, writes the secret ``own`` to it and
    returns ``own``.

    Only the owner may read the file, which is flushed to disk. Raises InputError if the file cannot
    be read or written, or does not have the length of ``own``.
    """
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        with private_file(path) as file:
            file.write(own)
        return own
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Make it readable."
        ) from None
    if len(secret) != len(own):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: must have {len(own)} bytes (got {len(secret)}). Restore the file.",
        )
    return secret


def fsync_folder(folder: Path) -> None:
    """Flushes the directory entries of ``folder`` to disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(path: Path, text: str) -> None:
    """Appends ``text`` to ``path``, which is created if missing. Raises InputError (FILE_INVALID)
    if the file cannot be written.

    A full file is renamed to end in ``.1``. Older files get the next number, and the oldest is
    removed.
    """
    try:
        if path.is_file() and path.stat().st_size + len(text) > MAX_FILE_BYTES:
            _make_room(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise write_error(path, error) from None


def _make_room(path: Path) -> None:
    """Renames a full file and its older parts. If that fails, the caller continues with the same
    file.
    """
    names = part_names(path)
    with contextlib.suppress(OSError):
        for number in range(OLDER, 0, -1):
            if names[number - 1].is_file():
                names[number - 1].replace(names[number])


def part_names(path: Path) -> list[Path]:
    """Returns the possible paths of a file that grows with the run and of its older parts, the
    newest first.
    """
    return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, OLDER + 1))]


def read_lines(path: Path) -> list[str]:
    """Returns the lines of ``path`` and of its older parts, the oldest first. Raises OSError."""
    parts = [part for part in reversed(part_names(path)) if part.is_file()]
    return [line for part in parts for line in part.read_text(encoding="utf-8").splitlines()]


@dataclass
class GrowingFile:
    """Reads new lines of a file that another process appends to, including its older parts.

    ``path``: The path that is passed to ``append``. ``max_bytes``: The maximum number of bytes of
    the first read, from the end of the newest file; None to read everything.
    """

    path: Path
    max_bytes: int | None = None
    # The inode of the file that was read last. Its name changes when it is full.
    _part: int = 0
    _offset: int = 0

    def new(self) -> Iterator[tuple[bytes, float]]:
        """Yields (new complete lines, time of the last write) for each file, the oldest first.
        Raises OSError; FileNotFoundError if no file exists.
        """
        with contextlib.ExitStack() as stack:
            files = {}
            # The newest file is opened first. Then no file is missed if files are renamed
            # meanwhile: one of them is opened twice.
            for part in part_names(self.path):
                with contextlib.suppress(FileNotFoundError):
                    file = stack.enter_context(part.open("rb"))
                    files[os.fstat(file.fileno()).st_ino] = file
            if not files:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            inodes = [*reversed(files)]
            if self._part in files:
                inodes = inodes[inodes.index(self._part) :]
            elif self.max_bytes is not None:
                inodes = inodes[-1:]
            for inode in inodes:
                file = files[inode]
                if inode != self._part:
                    size = os.fstat(file.fileno()).st_size
                    self._offset = 0 if self.max_bytes is None else max(0, size - self.max_bytes)
                    self._part = inode
                file.seek(self._offset)
                data = file.read()
                complete_lines = data[: data.rfind(b"\n") + 1]
                self._offset += len(complete_lines)
                yield complete_lines, os.fstat(file.fileno()).st_mtime

    def was_replaced(self) -> bool:
        """Returns whether the file that was read last is gone or became shorter."""
        for part in part_names(self.path) if self._part else ():
            with contextlib.suppress(OSError):
                status = part.stat()
                if status.st_ino == self._part:
                    return status.st_size < self._offset
        return self._part != 0


# Every connection is an open file, even before its caller has sent a certificate. Without a limit a
# stranger could use up all files, so that the process could neither write its own files nor accept
# a party.
def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as it is allowed and useful. Returns the
    limit.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (_MAX_FILES if limit == resource.RLIM_INFINITY else limit for limit in limits)
    wanted = min(hard, _MAX_FILES)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
            soft = wanted
        except (OSError, ValueError):
            # The limit stays: macOS allows less than it reports.
            pass
    if soft < _MIN_FILES:
        log.warning(
            "this process may open only %d files. Allow at least %d (ulimit -n).", soft, _MIN_FILES
        )
    return soft
