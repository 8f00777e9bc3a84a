"""Reads the bytes of a text file, and checks the positions of quotation marks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

_READ = 1 << 20


class QuotedBytes(io.RawIOBase):
    """Reads the bytes of a file with line ends of one byte, and checks the positions of quotation
    marks.

    Each opening mark must be at the beginning of a cell, and each closing mark at the end of a
    cell. Otherwise a mark may be an ordinary character, as in ``5" pipe``.

    right: Whether the marks so far are at valid positions.
    sound: Whether the marks are valid and the last one is closed.
    line_ends: The number of line ends so far, including those within cells.
    zero: The line with the first zero byte; 0 if there is none.
    quotes: Whether quotation marks are special characters.
    """

    def __init__(self, file: Any, separator: str, *, lines: bool, quotes: bool = True) -> None:
        self._file, self._lines, self._quotes = file, lines, quotes
        self._is_cell_end = np.zeros(256, bool)
        self._is_cell_end[[ord(sign) for sign in (separator, "\n", "\r", '"')]] = True
        self._buffer, self._last_byte, self._is_open, self._is_at_end = b"", b"\n", False, False
        self.right, self.line_ends, self.zero = True, 0, 0

    @property
    def sound(self) -> bool:
        return self.right and not self._is_open

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns ``size`` bytes. It returns fewer bytes only at the end of the file, because Arrow
        takes fewer bytes for the end.
        """
        while not self._is_at_end and (size < 0 or len(self._buffer) < size):
            data = self._file.read(max(size, _READ))
            if data.endswith(b"\r"):
                data += self._file.read(1)
            self._is_at_end = not data
            if self._lines:
                data = data.replace(b"\r\n", b"\n")
            self._check_marks(data)
            self._buffer += data
        end = len(self._buffer) if size < 0 else size
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        return data

    def _check_marks(self, data: bytes) -> None:
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
        around = np.frombuffer(self._last_byte + data + b"\n", np.uint8)
        opens = (np.arange(len(places)) % 2 == 0) ^ self._is_open
        neighbours = np.where(opens, around[places], around[places + 2])
        # If the last byte is a mark, its next byte is checked with the next chunk.
        at_end = ~opens & (places == len(data) - 1)
        if (
            self._is_open is False
            and self._last_byte == b'"'
            and data
            and not self._is_cell_end[data[0]]
        ):
            self.right = False
        self.right = self.right and bool((self._is_cell_end[neighbours] | at_end).all())
        self._is_open ^= len(places) % 2 == 1
        self._last_byte = data[-1:] or self._last_byte
