"""Shares arrays between the processes of one party: one process writes a file in memory, and all
processes map it.

The file has no name, so it disappears with the last process that has it open. Containers limit
``/dev/shm`` to 64 MiB, but this file is limited only by the memory of the process.
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
class BoardPlace:
    """The position of an array in the file. ``at``, ``end``: Its first byte and the byte after it.
    ``width``: The length of its rows; 0 for an array of one dimension.
    """

    at: int
    end: int
    rows: int
    width: int

    def to_bytes(self) -> bytes:
        """Returns the place as bytes for a message."""
        return np.array(astuple(self), np.int64).tobytes()

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Returns the place that ``to_bytes`` has encoded."""
        return cls(*np.frombuffer(written, np.int64).tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape."""
        return (self.rows, self.width) if self.width else (self.rows,)


class Board:
    """The shared file. ``number``: The descriptor of the file if a parent process has created
    it.
    """

    def __init__(self, number: int | None = None) -> None:
        self._file: BinaryIO = _create_file() if number is None else os.fdopen(number, "rb")

    @property
    def number(self) -> int:
        """Returns the file's descriptor."""
        return self._file.fileno()

    def put(self, array: Array, after: BoardPlace | None = None) -> BoardPlace:
        """Writes an array of one or two dimensions after the array at ``after``, or at the
        beginning. Returns its place. No process may be reading the overwritten bytes.
        """
        at = 0 if after is None else -(-after.end // _STEP) * _STEP
        place = BoardPlace(
            at, at + array.nbytes, len(array), array.shape[1] if array.ndim > 1 else 0
        )
        if array.size:
            np.memmap(self._file, array.dtype, "r+", at, array.shape)[...] = array
        return place

    def get(self, place: BoardPlace, kind: type[np.generic]) -> Array:
        """Returns the array at a place, mapped: it is not copied."""
        if place.at == place.end:
            return np.empty(place.shape, kind)
        return np.memmap(self._file, kind, "r", place.at, place.shape)

    def close(self) -> None:
        """Closes the file in this process."""
        self._file.close()


def _create_file() -> BinaryIO:
    """Creates the file; on systems without files in memory, an unnamed file on disk."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("vfl-board"), "w+b")
    return tempfile.TemporaryFile()
