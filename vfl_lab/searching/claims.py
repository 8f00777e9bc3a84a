"""Assigns the trials of a search to drivers. Drivers are programs that work on the same search, on
one machine or on several machines that share the folder of the search.

Each driver locks its own file. The operating system releases the lock when the driver ends, even by
a crash. Another driver can then repeat the unfinished trial.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from vfl_common.errors import Code, InputError
from vfl_common.files import hold_lock, lock_file, write_error

_FOLDER = ".drivers"
# The files that a driver locks while it chooses a trial, and while it writes the journal.
_CHOOSING, _WRITING = "choosing", "writing"
# The number of bytes to read at a time when looking for the journal's last line end.
_BLOCK = 1 << 12


class Claims:
    """The locks of one driver, as a context manager. ``driver`` is a random name for this driver.

    Raises InputError if the folder cannot be written or its file system does not support locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.driver = folder / _FOLDER, secrets.token_hex(8)
        self._file = _open_lock(folder, self.driver)
        self._choice_file = _open_lock(folder, _CHOOSING)
        try:
            lock_file(self._file, wait=True)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: the file system does not support locks ({error.strerror}). Give the "
                "search a folder on another file system.",
            ) from None

    @contextlib.contextmanager
    def lock_choice(self) -> Iterator[None]:
        """Locks the choice of the next trial for a block. Only one driver at a time is in the
        block.
        """
        with hold_lock(self._choice_file):
            yield

    def is_running(self, driver: str | None) -> bool:
        """Returns whether the driver of this name is still running."""
        if driver == self.driver:
            return True
        path = self._folder / str(driver)
        try:
            with path.open("r+") as file:
                if not lock_file(file, wait=False):
                    return True
        except OSError:
            return False
        # Names are random, so no other driver will use this file.
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        """Releases all locks of this driver."""
        (self._folder / self.driver).unlink(missing_ok=True)
        self._file.close()
        self._choice_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JournalLock:
    """The lock of a search's journal, with Optuna's interface for locks. Optuna's own locks are not
    released when a program is killed.

    ``acquire`` also removes an incomplete last line, which a full disk or a power failure may
    leave. Optuna ignores an incomplete line only as long as no other line follows.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Waits for the lock, and removes an incomplete last line of the journal."""
        self._file = _open_lock(self._journal.parent, _WRITING)
        lock_file(self._file, wait=True)
        with self._journal.open("r+b") as lines:
            _remove_incomplete_line(lines)
        return True

    def release(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()


def _remove_incomplete_line(file: IO[bytes]) -> None:
    """Truncates a file after its last line end."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        length = file.read(end - begin).rfind(b"\n") + 1
        end = begin + length
        if length:
            break
    if end < size:
        file.truncate(end)


def _open_lock(folder: Path, name: str) -> IO[str]:
    """Opens a lock file for writing, which network file systems require for locks. Raises
    InputError.
    """
    path = folder / _FOLDER / name
    try:
        path.parent.mkdir(exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as error:
        raise write_error(path, error) from None
