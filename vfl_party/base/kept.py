"""SQLite files of a party. Several of its programs may change a file at the same time, and no
change is lost if a program is killed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from vfl_common.errors import Code, InputError, UnwritableError


class KeptFile:
    """An SQLite file of the party. Threads use it one after the other. Raises InputError if the
    file cannot be used.

    ``tables``: The definition of each table, as after ``CREATE TABLE``.
    """

    def __init__(self, path: Path, *tables: str) -> None:
        self._lock, self._path = threading.Lock(), path
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._file.execute("PRAGMA journal_mode = WAL")
            for table in tables:
                self._file.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        except (sqlite3.Error, OSError) as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be used ({error}). Restore it, or move it away to start a new "
                "one.",
            ) from None

    @contextlib.contextmanager
    def begin_transaction(self) -> Iterator[sqlite3.Connection]:
        """Opens a transaction. Raises UnwritableError if the changes cannot be written."""
        with self._lock:
            try:
                self._file.execute("BEGIN IMMEDIATE")
                yield self._file
                self._file.execute("COMMIT")
            except sqlite3.Error as error:
                raise UnwritableError(Code.FILE_INVALID, "its files cannot be written").privately(
                    f"{self._path}: cannot be written ({error}). Free disk space, or restore the "
                    "file."
                ) from None
            finally:
                # The transaction is rolled back, so that the file can be used again once the disk
                # has space.
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()
