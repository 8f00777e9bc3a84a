"""Text whose cells are separated by several characters, such as ``::``, or by runs of spaces."""

from __future__ import annotations

import io
import re
from typing import Any

from vfl_party.data import checks

# Value of data.separator for runs of spaces and tabs; those at the ends of a line are ignored.
SPACES = "whitespace"
# Stands for the separator while the file is read: the unit separator, which tables do not use.
UNIT = "\x1f"
_UNIT = UNIT.encode()
_READ = 1 << 20
_ENDS = re.compile(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)")
_RUNS = re.compile(rb"[ \t]+")


class SeparatorReplacer(io.RawIOBase):
    """Passes the bytes of a file on, with ``UNIT`` in place of each separator, in blocks of lines.

    Args:
        source: the file's name, for errors.
        file: closed with this object.
        separator: two or more characters, or ``SPACES``.
        longest: maximum bytes of a line; longer ones raise InputError.
    """

    def __init__(self, source: str, file: Any, separator: str, longest: int) -> None:
        self._source, self._file, self._longest = source, file, longest
        self._separator = None if separator == SPACES else separator.encode()
        self._rest, self._ready, self._lines = b"", b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns at most ``size`` bytes, and none only at the end."""
        parts, wanted = [], size
        while wanted:
            if not self._ready and not self._fill():
                break
            part = self._ready if wanted < 0 else self._ready[:wanted]
            self._ready = self._ready[len(part) :]
            parts.append(part)
            wanted -= 0 if wanted < 0 else len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Fills a buffer as far as there are bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _fill(self) -> bool:
        """Makes the next lines ready; False at the end. Raises InputError."""
        pieces = [self._rest]
        total = len(self._rest)
        while True:
            data = self._file.read(_READ)
            end = data.rfind(b"\n") + 1
            if not data or end:
                break
            pieces.append(data)
            total += len(data)
            if total > self._longest:
                raise checks.unreadable(
                    self._source,
                    f"line {self._lines + 1:,} has more than {self._longest:,} characters. Write "
                    "the file again, one row a line.",
                )
        lines = b"".join([*pieces, data[:end]])
        self._rest = data[end:]
        if _UNIT in lines:
            place = self._lines + lines.count(b"\n", 0, lines.index(_UNIT)) + 1
            raise checks.unreadable(
                self._source,
                f"line {place:,} holds the character U+001F, which stands for data.separator here. "
                "Remove it.",
            )
        self._lines += lines.count(b"\n")
        self._ready = self._with_units(lines)
        return bool(lines)

    def _with_units(self, lines: bytes) -> bytes:
        if self._separator is None:
            return _RUNS.sub(_UNIT, _ENDS.sub(b"", lines))
        return lines.replace(self._separator, _UNIT)
