"""Stores rows of equal size in a file instead of in memory. The file grows by batches, and only its
owner may read it.

A checksum follows each batch, so that a half-written or damaged batch is detected.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import write_error

_SUM_BYTES = 4


@dataclass(frozen=True)
class Spill:
    """A file of batches of rows, which may not exist yet.

    Args:
        path: The file, in a folder that exists.
        row_bytes: The size of a row, in bytes.
        batch: The number of rows in a batch; the last batch may have fewer.
        remedy: A sentence that says what to do about a damaged file.
    """

    path: Path
    row_bytes: int
    batch: int
    remedy: str

    def count_rows(self) -> int:
        """Returns the number of stored rows, including those of a half-written batch."""
        try:
            num_batches, rest_bytes = divmod(self.path.stat().st_size, self._batch_bytes)
        except OSError:
            return 0
        return num_batches * self.batch + max(0, rest_bytes - _SUM_BYTES) // self.row_bytes

    def cut(self, rows: int) -> None:
        """Truncates the file after the complete batches among its first ``rows`` rows. Raises
        InputError.
        """
        stored = self.count_rows()
        try:
            if stored != rows and self.path.exists():
                os.truncate(self.path, min(stored, rows) // self.batch * self._batch_bytes)
        except OSError as error:
            raise write_error(self.path, error) from None

    def write(self, number: int, rows: bytes | memoryview) -> None:
        """Writes batch ``number``. All earlier batches must be in the file. Raises InputError."""
        remaining = memoryview(b"".join((rows, zlib.crc32(rows).to_bytes(_SUM_BYTES, "little"))))
        offset = number * self._batch_bytes
        try:
            file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            try:
                while remaining:
                    written = os.pwrite(file, remaining, offset)
                    remaining, offset = remaining[written:], offset + written
            finally:
                os.close(file)
        except OSError as error:
            raise write_error(self.path, error) from None

    def read(self, number: int, rows: int) -> bytes:
        """Returns the bytes of batch ``number`` of a file with ``rows`` rows in all. Raises
        InputError if the batch is missing or damaged.
        """
        size = min(self.batch, rows - number * self.batch) * self.row_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(number * self._batch_bytes)
                content = file.read(size + _SUM_BYTES)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID, f"{self.path}: cannot be read ({error.strerror}). {self.remedy}"
            ) from None
        data, checksum = content[:size], content[size:]
        if zlib.crc32(data).to_bytes(_SUM_BYTES, "little") != checksum:
            raise InputError(Code.FILE_INVALID, f"{self.path}: is damaged. {self.remedy}")
        return data

    @property
    def _batch_bytes(self) -> int:
        return self.batch * self.row_bytes + _SUM_BYTES
