"""Stores rows of one size in a file that grows by batches, so that they need no memory. Only its
owner may read the file.

A checksum follows each batch, so that a batch which a killed process has half written, or which the
disk has damaged, is not read as rows.
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
    """A file of batches, which may not exist yet.

    Args:
        path: the file, in a folder that exists.
        row_bytes: the bytes of a row.
        batch: the rows of a batch; the last batch may have fewer.
        remedy: what to do about a damaged file, as a sentence.
    """

    path: Path
    row_bytes: int
    batch: int
    remedy: str

    def count_rows(self) -> int:
        """Returns the number of stored rows, including those of a half-written batch."""
        try:
            whole, rest = divmod(self.path.stat().st_size, self._stride)
        except OSError:
            return 0
        return whole * self.batch + max(0, rest - _SUM_BYTES) // self.row_bytes

    def cut(self, rows: int) -> None:
        """Removes all after the whole batches of the first ``rows`` rows. Raises InputError."""
        stored = self.count_rows()
        try:
            if stored != rows and self.path.exists():
                os.truncate(self.path, min(stored, rows) // self.batch * self._stride)
        except OSError as error:
            raise write_error(self.path, error) from None

    def write(self, number: int, rows: bytes | memoryview) -> None:
        """Writes a batch at its place; earlier batches must be there. Raises InputError."""
        left = memoryview(b"".join((rows, zlib.crc32(rows).to_bytes(_SUM_BYTES, "little"))))
        place = number * self._stride
        try:
            file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
            try:
                while left:
                    written = os.pwrite(file, left, place)
                    left, place = left[written:], place + written
            finally:
                os.close(file)
        except OSError as error:
            raise write_error(self.path, error) from None

    def read(self, number: int, rows: int) -> bytes:
        """Returns the bytes of a batch of a file that holds ``rows`` rows. Raises InputError if the
        batch is missing or damaged.
        """
        size = min(self.batch, rows - number * self.batch) * self.row_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(number * self._stride)
                content = file.read(size + _SUM_BYTES)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID, f"{self.path}: cannot be read ({error.strerror}). {self.remedy}"
            ) from None
        data, total = content[:size], content[size:]
        if zlib.crc32(data).to_bytes(_SUM_BYTES, "little") != total:
            raise InputError(Code.FILE_INVALID, f"{self.path}: is damaged. {self.remedy}")
        return data

    @property
    def _stride(self) -> int:
        return self.batch * self.row_bytes + _SUM_BYTES
