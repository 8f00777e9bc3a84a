"""Decides which program makes which trial, so that several can work on one search, on one machine
or on several that share its folder.

Each driver locks its own file. The operating system releases the lock when the driver ends, however
it ends, so another driver can repeat its trial.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

from vfl_common.errors import Code, InputError
from vfl_common.files import write_error

_FOLDER = ".drivers"
# The files to lock while a trial is chosen, and while the journal is written.
_CHOOSING, _WRITING = "choosing", "writing"
# The bytes to read at a time when searching the end of the journal's last line.
_BLOCK = 1 << 12


class Claims:
    """The claims of one driver, for a block.

    ``own``: the driver's name. Raises InputError if the folder cannot be written or its file system
    has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.own = folder / _FOLDER, secrets.token_hex(8)
        self._file = _open_lock(folder, self.own)
        self._choosing = _open_lock(folder, _CHOOSING)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: its file system has no locks ({error.strerror}). Give the search a "
                "folder on another file system.",
            ) from None

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Waits until no other driver is in such a block."""
        fcntl.flock(self._choosing, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._choosing, fcntl.LOCK_UN)

    def works(self, driver: str | None) -> bool:
        """Returns whether a driver still runs."""
        if driver == self.own:
            return True
        path = self._folder / str(driver)
        try:
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        # A driver's name is unique, so nobody opens the file again.
        path.unlink(missing_ok=True)
        return False

    def close(self) -> None:
        """Gives up all claims."""
        (self._folder / self.own).unlink(missing_ok=True)
        self._file.close()
        self._choosing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writing:
    """The lock of a search's journal, with Optuna's interface. Optuna's own locks outlive a killed
    program, and block all others.

    ``journal``: its file. A line that a full disk or a power failure has truncated is removed
    before the next one is written: Optuna ignores such a line only if it is the last one.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._file = _open_lock(self._journal.parent, _WRITING)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        with self._journal.open("r+b") as lines:
            _end_with_a_line(lines)
        return True

    def release(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            self._file.close()


def _end_with_a_line(file: IO[bytes]) -> None:
    """Removes what follows the last line end."""
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
    """Opens a file for writing, so that network file systems can lock it, too. Raises
    InputError.
    """
    path = folder / _FOLDER / name
    try:
        path.parent.mkdir(exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as error:
        raise write_error(path, error) from None
