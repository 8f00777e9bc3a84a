"""Arrays that processes of one party share: a file in memory, written by one, mapped by all.

It has no name, so it ends with the last process that has it open, however that ends. Unlike
``/dev/shm``, which containers bound to 64 MiB, it is bounded by the memory that a process may have.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import astuple, dataclass
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Arrays begin at multiples of this number of bytes.
_STEP = 64


@dataclass(frozen=True)
class Place:
    """Where an array lies: from byte ``at`` to ``end``; ``width``: of its rows, 0 if it has one
    dimension.
    """

    at: int
    end: int
    rows: int
    width: int

    def to_bytes(self) -> bytes:
        """Returns it for a message."""
        return np.array(astuple(self), np.int64).tobytes()

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Returns what ``written`` has made."""
        return cls(*np.frombuffer(written, np.int64).tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape."""
        return (self.rows, self.width) if self.width else (self.rows,)


class Board:
    """The file. ``number``: its descriptor, if a parent has made it."""

    def __init__(self, number: int | None = None) -> None:
        self._file: BinaryIO = _memory() if number is None else os.fdopen(number, "rb")

    @property
    def number(self) -> int:
        """Returns the file's descriptor."""
        return self._file.fileno()

    def put(self, array: Array, after: Place | None = None) -> Place:
        """Writes an array of one or two dimensions behind another one, or at the beginning. Returns
        its place. Nobody may be reading what was there.
        """
        at = 0 if after is None else -(-after.end // _STEP) * _STEP
        place = Place(at, at + array.nbytes, len(array), array.shape[1] if array.ndim > 1 else 0)
        if array.size:
            np.memmap(self._file, array.dtype, "r+", at, array.shape)[...] = array
        return place

    def get(self, place: Place, kind: type[np.generic]) -> Array:
        """Returns the array at a place, mapped: it is not copied."""
        if place.at == place.end:
            return np.empty(place.shape, kind)
        return np.memmap(self._file, kind, "r", place.at, place.shape)

    def close(self) -> None:
        """Closes the file in this process."""
        self._file.close()


def _memory() -> BinaryIO:
    """Makes the file; where the system has none in memory, one on disk that has no name."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("vfl-board"), "w+b")
    return tempfile.TemporaryFile()
