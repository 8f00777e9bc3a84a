"""Files of a party's own that several of its programs may change at once; they outlive a kill."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from vfl_common.errors import Code, InputError


class KeptFile:
    """A file of the party's own, for one thread at a time. Raises InputError if it cannot be used.

    ``tables``: the statements that make its tables.
    """

    def __init__(self, path: Path, *tables: str) -> None:
        self._lock = threading.Lock()
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._file.execute("PRAGMA journal_mode = WAL")
            for each in tables:
                self._file.execute(f"CREATE TABLE IF NOT EXISTS {each}")
        except (sqlite3.Error, OSError) as error:
            text = f"{path}: cannot be used ({error}); restore it, or move it away to begin anew"
            raise InputError(Code.FILE_INVALID, text) from None

    @contextlib.contextmanager
    def changing(self) -> Iterator[sqlite3.Connection]:
        """Yields the file for changes that are made together."""
        with self._lock:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield self._file
                self._file.execute("COMMIT")
            finally:
                # A disk that is full for a moment must not end all answers.
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()
