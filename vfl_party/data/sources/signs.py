"""Reads text whose cells are separated by several characters, such as ``::``, or by runs of
spaces.
"""

from __future__ import annotations

import io
import re
from typing import Any

from vfl_party.data import checks

# The value of data.separator for runs of spaces and tabs. Spaces at the ends of a line are ignored.
SPACES = "whitespace"
# The unit separator, which replaces the separator while a file is read. Tables do not use it.
UNIT = "\x1f"
_UNIT = UNIT.encode()
_READ = 1 << 20
_ENDS = re.compile(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)")
_RUNS = re.compile(rb"[ \t]+")


class SeparatorReplacer(io.RawIOBase):
    """Reads the bytes of a file, with each separator replaced by ``UNIT``.

    Args:
        source: The name of the file, for errors.
        file: The file, which is closed with this object.
        separator: Two or more characters, or ``SPACES``.
        longest: The maximum size of a line in bytes. A longer line raises InputError.
    """

    def __init__(self, source: str, file: Any, separator: str, longest: int) -> None:
        self._source, self._file, self._longest = source, file, longest
        self._separator = None if separator == SPACES else separator.encode()
        self._tail, self._buffer, self._lines = b"", b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns at most ``size`` bytes; b"" only at the end of the file."""
        parts, bytes_left = [], size
        while bytes_left:
            if not self._buffer and not self._fill():
                break
            part = self._buffer if bytes_left < 0 else self._buffer[:bytes_left]
            self._buffer = self._buffer[len(part) :]
            parts.append(part)
            bytes_left -= 0 if bytes_left < 0 else len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer, and returns their number."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _fill(self) -> bool:
        """Reads the next lines into the buffer. Returns False at the end of the file. Raises
        InputError.
        """
        chunks = [self._tail]
        total = len(self._tail)
        while True:
            data = self._file.read(_READ)
            end = data.rfind(b"\n") + 1
            if not data or end:
                break
            chunks.append(data)
            total += len(data)
            if total > self._longest:
                raise checks.unreadable(
                    self._source,
                    f"line {self._lines + 1:,} has more than {self._longest:,} characters. Write "
                    "the file again, one row a line.",
                )
        lines = b"".join([*chunks, data[:end]])
        self._tail = data[end:]
        if _UNIT in lines:
            line = self._lines + lines.count(b"\n", 0, lines.index(_UNIT)) + 1
            raise checks.unreadable(
                self._source,
                f"line {line:,} holds the character U+001F, which stands for data.separator here. "
                "Remove it.",
            )
        self._lines += lines.count(b"\n")
        self._buffer = self._replace_separators(lines)
        return bool(lines)

    def _replace_separators(self, lines: bytes) -> bytes:
        if self._separator is None:
            return _RUNS.sub(_UNIT, _ENDS.sub(b"", lines))
        return lines.replace(self._separator, _UNIT)
