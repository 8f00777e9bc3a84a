"""Checks the types that a MAT file of version 5 to 7 declares: SciPy looks a type up unchecked,
which may crash the process.

Source: MATLAB's "MAT-File Format", Level 5: elements of a tag (type and bytes) and data.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_COMPRESSED, _MATRIX = 15, 14
# Types of numbers and of text.
_KNOWN = frozenset((*range(1, 8), 9, 12, 13, 16, 17, 18))
# Classes of arrays whose values follow their name: text and numbers.
_PLAIN = frozenset((4, *range(6, 16)))
# Maximum bytes of an array's flags, dimensions and name.
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
        for head in _heads(file, order):
            _require_known(head, order)


def _heads(file: IO[bytes], order: str) -> Iterator[bytes]:
    """Yields the beginning of each array of a file, after its tag."""
    while len(tag := file.read(8)) == 8:
        kind, size = struct.unpack(f"{order}II", tag)
        after = file.tell() + size
        head = file.read(min(size, _HEAD))
        if kind == _COMPRESSED:
            head = zlib.decompressobj().decompress(head, _HEAD)
            kind, head = struct.unpack_from(f"{order}I", head)[0], head[8:]
        if kind == _MATRIX:
            yield head
        file.seek(after)


def _require_known(head: bytes, order: str) -> None:
    if head[8 if order == "<" else 11] not in _PLAIN:
        return
    place = 16
    # Dimensions and name.
    for _ in range(2):
        word, size = struct.unpack_from(f"{order}II", head, place)
        # A small element has its data within its tag.
        place += 8 if word >> 16 else 8 + -(-size // 8) * 8
    word = struct.unpack_from(f"{order}I", head, place)[0]
    if (word & 0xFFFF if word >> 16 else word) not in _KNOWN:
        raise ValueError(f"type {word}")
