"""Creates a folder for the temporary files of a database. It is deleted when this process ends, or
else by the next process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from vfl_common.errors import Code, InputError

_PREFIX = "vfl-spill-"


class RowSpill:
    """A new folder in ``scratch``. It is locked, so that other processes do not delete it while it
    is in use.

    Raises InputError if the folder cannot be created.
    """

    def __init__(self, scratch: str) -> None:
        try:
            Path(scratch).mkdir(parents=True, exist_ok=True)
            for old_folder in Path(scratch).glob(f"{_PREFIX}*"):
                _delete_unused(old_folder)
            lock = None
            # The lock is None if another process has deleted the folder before it was locked.
            while lock is None:
                self.folder = Path(tempfile.mkdtemp(dir=scratch, prefix=_PREFIX))
                lock = _lock(self.folder)
            self._lock = lock
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{scratch}: cannot hold temporary files ({error.strerror}). Set data.scratch to "
                "another folder.",
            ) from None

    def close(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _delete_unused(folder: Path) -> None:
    lock = _lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder, and returns its descriptor. Returns None if another process has locked it, or
    if it does not exist.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if folder.exists():
            return descriptor
        os.close(descriptor)
    return None
