"""Writing files so that a process that dies leaves the old one or the new one, never half of one.

Not for checkpoints, which outlast a power failure too (``checkpoint.py``): these files are written often, and to wait
for the disk costs milliseconds.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from vfl_common.errors import Code, InputError

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of a run or a checkpoint: one folder or file, no path


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def unwritable(
    path: Path, error: OSError, what: str = "cannot be written", code: Code = Code.FILE_INVALID
) -> InputError:
    """One sentence about a file that the system refused to write, and what to do where there was no room for it.

    Peers are told as much, but not where.
    """
    if error.errno not in _FULL:
        return InputError(code, f"{path}: {what} ({error.strerror})")
    text = f"{path}: {what} ({error.strerror}); make room there, and start again what has ended"
    return InputError(code, text, public=f"the party cannot write its files ({error.strerror})")


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` with ``text``; the folder must exist. Raises InputError (FILE_INVALID) where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def append(path: Path, text: str) -> None:
    """Adds to a file, which is made where it is missing. Raises InputError (FILE_INVALID) where that fails."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise unwritable(path, error) from None
