"""Says which program makes which trial, so that several can work on one search, on one machine or
on several that share its folder.

Each driver holds a lock on a file of its own. The lock goes when the driver ends, however it ends,
so its trial is begun again by another one.
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
from vfl_common.files import unwritable

_FOLDER = ".drivers"
# Held while a trial is chosen, and while the journal is written.
_CHOOSING, _WRITING = "choosing", "writing"
# Bytes of the journal that are looked at for the end of its last line.
_BLOCK = 1 << 12


class Claims:
    """The claims of one driver, for a block. ``own``: its name. Raises InputError if the folder
    cannot be written or has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.own = folder / _FOLDER, secrets.token_hex(8)
        self._file = _opened(folder, self.own)
        self._choosing = _opened(folder, _CHOOSING)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            text = f"{folder}: its file system has no locks ({error.strerror})"
            raise InputError(
                Code.FILE_INVALID, f"{text}; give the search a folder on another one"
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
        # Nobody opens it again: a driver's name is its own.
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
    """The lock of a search's journal, as Optuna wants it. Optuna's own outlive a program that is
    killed, and then everybody waits.

    ``journal``: its file. A line that a full disk or a power failure has cut short is removed
    before the next one is written: Optuna reads over it only as long as it is the last one.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: IO[str] | None = None

    def acquire(self) -> bool:
        """Waits for the lock."""
        self._file = _opened(self._journal.parent, _WRITING)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        with self._journal.open("r+b") as lines:
            _end_with_a_line(lines)
        return True

    def release(self) -> None:
        """Gives it up."""
        if self._file is not None:
            self._file.close()


def _end_with_a_line(file: IO[bytes]) -> None:
    """Cuts what stands behind the last end of a line."""
    end = size = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        found = file.read(end - begin).rfind(b"\n") + 1
        end = begin + found
        if found:
            break
    if end < size:
        file.truncate(end)


def _opened(folder: Path, name: str) -> IO[str]:
    """Opens a file that can be locked on a network's file system, too: for writing. Raises
    InputError.
    """
    path = folder / _FOLDER / name
    try:
        path.parent.mkdir(exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+")
    except OSError as error:
        raise unwritable(path, error) from None
