"""Rows of one size in a file that grows by batches, so that they need no memory. Only its owner may
read the file.

Behind each batch stands its checksum. So a batch that a killed process has half written, or that
the disk has damaged, is not taken for rows.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import unwritable

_SUM_BYTES = 4


@dataclass(frozen=True)
class Spill:
    """One such file, which need not exist.

    Args:
        path: the file, in a folder that exists.
        row_bytes: of each row.
        batch: rows of each batch; the last one may have fewer.
        remedy: what a person does about a damaged file.
    """

    path: Path
    row_bytes: int
    batch: int
    remedy: str

    def stored(self) -> int:
        """Returns how many rows are there, with those of a half-written batch."""
        try:
            whole, rest = divmod(self.path.stat().st_size, self._stride)
        except OSError:
            return 0
        return whole * self.batch + max(0, rest - _SUM_BYTES) // self.row_bytes

    def cut(self, rows: int) -> None:
        """Removes what is beyond whole batches of ``rows`` rows in all. Raises InputError."""
        found = self.stored()
        try:
            if found != rows and self.path.exists():
                os.truncate(self.path, min(found, rows) // self.batch * self._stride)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def write(self, number: int, rows: bytes | memoryview) -> None:
        """Writes a batch at its place; those before it are there. Raises InputError."""
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
            raise unwritable(self.path, error) from None

    def read(self, number: int, rows: int) -> bytes:
        """Returns a batch, of a file that holds ``rows`` rows. Raises InputError if it is missing
        or damaged.
        """
        size = min(self.batch, rows - number * self.batch) * self.row_bytes
        try:
            with self.path.open("rb") as file:
                file.seek(number * self._stride)
                found = file.read(size + _SUM_BYTES)
        except OSError as error:
            text = f"{self.path}: cannot be read ({error.strerror}); {self.remedy}"
            raise InputError(Code.FILE_INVALID, text) from None
        data, total = found[:size], found[size:]
        if zlib.crc32(data).to_bytes(_SUM_BYTES, "little") != total:
            text = f"{self.path}: is damaged; {self.remedy}"
            raise InputError(Code.FILE_INVALID, text)
        return data

    @property
    def _stride(self) -> int:
        return self.batch * self.row_bytes + _SUM_BYTES
