"""Checks the types that a MAT file of version 5 to 7 declares, because an unknown type may crash
SciPy and the process.

The format is described in MATLAB's "MAT-File Format", Level 5: each element is a tag (its type and
size) and data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_COMPRESSED, _MATRIX = 15, 14
# The types of numbers and of text.
_KNOWN = frozenset((*range(1, 8), 9, 12, 13, 16, 17, 18))
# The classes of arrays of text or numbers, whose values follow their name.
_SIMPLE_CLASSES = frozenset((4, *range(6, 16)))
# The maximum size in bytes of an array's flags, dimensions and name.
_HEAD = 1 << 14


def require_known_types(source: str) -> None:
    """Raises ValueError if an array of numbers or text declares an unknown type; struct.error or
    zlib.error if its beginning is cut off or damaged.
    """
    from scipy.io.matlab import matfile_version

    if matfile_version(source)[0] != 1:
        return
    with Path(source).open("rb") as file:
        order = "<" if file.read(128)[126:] == b"IM" else ">"
        for head in _read_heads(file, order):
            _require_known(head, order)


def _read_heads(file: IO[bytes], order: str) -> Iterator[bytes]:
    """Yields the beginning of each array of a file, after its tag."""
    while len(tag := file.read(8)) == 8:
        kind, size = struct.unpack(f"{order}II", tag)
        end = file.tell() + size
        head = file.read(min(size, _HEAD))
        if kind == _COMPRESSED:
            head = zlib.decompressobj().decompress(head, _HEAD)
            kind, head = struct.unpack_from(f"{order}I", head)[0], head[8:]
        if kind == _MATRIX:
            yield head
        file.seek(end)


def _require_known(head: bytes, order: str) -> None:
    if head[8 if order == "<" else 11] not in _SIMPLE_CLASSES:
        return
    offset = 16
    # The elements with the dimensions and the name are skipped.
    for _ in range(2):
        word, size = struct.unpack_from(f"{order}II", head, offset)
        # A small element has its data inside its tag.
        offset += 8 if word >> 16 else 8 + -(-size // 8) * 8
    word = struct.unpack_from(f"{order}I", head, offset)[0]
    if (word & 0xFFFF if word >> 16 else word) not in _KNOWN:
        raise ValueError(f"the array has an unknown type (got {word})")
