"""Passes the bytes of a text file on, and checks the positions of quotation marks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

_READ = 1 << 20


class QuotedBytes(io.RawIOBase):
    """Passes the bytes of a file on, with line ends of one byte, and checks the positions of
    quotation marks.

    Each opening mark must be at the beginning of a cell, and each closing one at its end. ``sound``
    is false otherwise; a mark may then be an ordinary character, as in ``5" pipe``. ``right``: the
    same, but a last open mark is allowed. ``line_ends``: number so far, also within cells.
    ``quotes``: whether quotation marks are special.
    """

    def __init__(self, file: Any, separator: str, *, lines: bool, quotes: bool = True) -> None:
        self._file, self._lines, self._quotes = file, lines, quotes
        self._ends = np.zeros(256, bool)
        self._ends[[ord(sign) for sign in (separator, "\n", "\r", '"')]] = True
        self._kept, self._before, self._open, self._ended = b"", b"\n", False, False
        self.right, self.line_ends, self.zero = True, 0, 0

    @property
    def sound(self) -> bool:
        return self.right and not self._open

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns ``size`` bytes, fewer only at the end, because Arrow takes fewer for the end."""
        while not self._ended and (size < 0 or len(self._kept) < size):
            data = self._file.read(max(size, _READ))
            if data.endswith(b"\r"):
                data += self._file.read(1)
            self._ended = not data
            if self._lines:
                data = data.replace(b"\r\n", b"\n")
            self._look(data)
            self._kept += data
        end = len(self._kept) if size < 0 else size
        data, self._kept = self._kept[:end], self._kept[end:]
        return data

    def _look(self, data: bytes) -> None:
        if self._lines and not self.zero and b"\0" in data:
            self.zero = self.line_ends + data.count(b"\n", 0, data.index(b"\0")) + 1
        self.line_ends += data.count(b"\n") if self._lines else 0
        if not self._quotes:
            return
        places = (
            np.flatnonzero(np.frombuffer(data, np.uint8) == ord('"'))
            if b'"' in data
            else np.empty(0, np.int64)
        )
        around = np.frombuffer(self._before + data + b"\n", np.uint8)
        opens = (np.arange(len(places)) % 2 == 0) ^ self._open
        neighbours = np.where(opens, around[places], around[places + 2])
        # The neighbour of a last quote comes with the next bytes, which are then checked.
        at_end = ~opens & (places == len(data) - 1)
        if self._open is False and self._before == b'"' and data and not self._ends[data[0]]:
            self.right = False
        self.right = self.right and bool((self._ends[neighbours] | at_end).all())
        self._open ^= len(places) % 2 == 1
        self._before = data[-1:] or self._before
