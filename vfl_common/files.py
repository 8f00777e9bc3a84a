"""Writing files so that a process that dies leaves the old one or the new one, never half of one.

Not for checkpoints, which outlast a power failure too (``checkpoint.py``): these files are written often, and to wait
for the disk costs milliseconds.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from vfl_common.errors import Code, InputError

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of a run or a checkpoint: one folder or file, no path


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` with ``text``; the folder must exist. Raises InputError (FILE_INVALID) where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(Code.FILE_INVALID, f"{path}: cannot be written ({error.strerror})") from None
