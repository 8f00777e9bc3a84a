"""A folder for another program's temporary files, deleted at the end of this process, or else by
the next one.
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
    """A new folder below ``scratch``. Its maker locks it, so that other processes see that it is in
    use.

    Raises InputError if it cannot be made.
    """

    def __init__(self, scratch: str) -> None:
        try:
            Path(scratch).mkdir(parents=True, exist_ok=True)
            for left in Path(scratch).glob(f"{_PREFIX}*"):
                _delete_unused(left)
            lock = None
            # None if another process has found it before it was locked.
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
    """Returns the descriptor of a folder locked for this process; None if another process holds it,
    or it is gone.
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
