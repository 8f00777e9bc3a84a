"""Writing files so that a process that dies leaves the old one or the new one, never half of one.

Not for checkpoints, which outlast a power failure too (``checkpoint.py``): these files are written often, and to wait
for the disk costs milliseconds.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str) -> None:
    """Replaces ``path`` with ``text``; the folder must exist."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
