"""Reads IDX files, MNIST's format: a magic number, the length of each dimension, the values."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import split_member
from vfl_party.data import checks
from vfl_party.data.row_arrays import Space, rows_at_once
from vfl_party.data.sources.arrays import array_rows, load_arrays
from vfl_party.data.sources.packed import BROKEN, open_bytes
from vfl_party.data.table import Rows

IMAGES, LABELS, VALUES = "images", "labels", "values"
_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_READ = 1 << 20
# The maximum number of dimensions, and the maximum size of a row in bytes.
_MAX_DIMENSIONS, _MAX_ROW_BYTES = 32, 1 << 30
# A pattern for the name of a file of images, and its replacement in the name of the label file.
_PAIR = (re.compile("images(.)idx3"), r"labels\1idx1")


def read_idx(settings: DataSettings, with_label: bool) -> Rows:
    """Reads an IDX file. An array of three or more dimensions is called ``images``, another array
    ``values``.

    For a file ``…images-idx3-ubyte``, the file ``…labels-idx1-ubyte`` in the same folder becomes
    the array ``labels``. Raises InputError.
    """
    source, space = settings.source, Space.of(settings)
    values = read_array(source, space)
    arrays = {IMAGES if values.ndim > 2 else VALUES: values}
    labels = _find_labels(source)
    if labels is not None:
        arrays[LABELS] = read_array(labels, space)
    return array_rows(
        load_arrays(settings, with_label, list(arrays), arrays.__getitem__), settings, with_label
    )


def read_array(source: str, space: Space) -> npt.NDArray[Any]:
    """Reads the array of a file into ``space``, in this machine's byte order. Raises InputError."""
    try:
        with open_bytes(source) as file:
            kind, shape = _read_header(source, file)
            return _read_values(source, file, kind, shape, space)
    except BROKEN:
        raise _make_unreadable_error(source) from None


def _read_header(source: str, file: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the type of the values and the length of each dimension. Raises InputError."""
    head = file.read(4)
    is_valid = len(head) == 4 and head[:2] == b"\0\0" and head[2] in _TYPES
    if not is_valid or not 1 <= head[3] <= _MAX_DIMENSIONS:
        raise checks.unreadable(
            source, "does not begin like an IDX file. Correct data.source or data.format."
        )
    lengths = file.read(4 * head[3])
    if len(lengths) < 4 * head[3]:
        raise _make_unreadable_error(source)
    return np.dtype(_TYPES[head[2]]), tuple(np.frombuffer(lengths, ">u4").tolist())


def _read_values(
    source: str, file: Any, kind: np.dtype[Any], shape: tuple[int, ...], space: Space
) -> npt.NDArray[Any]:
    """Reads the values in blocks of rows, so that memory is limited by the file's size. Raises
    InputError.
    """
    lengths = " x ".join(map(str, shape))
    row_bytes = math.prod(shape[1:]) * kind.itemsize
    if shape[0] and not 0 < row_bytes <= _MAX_ROW_BYTES:
        raise checks.unreadable(
            source,
            f"declares {lengths} values, which cannot be rows of a table. Write the file again.",
        )
    rows, step = space.growing(shape[1:], kind.newbyteorder("=")), rows_at_once(row_bytes)
    for start in range(0, shape[0], step):
        count = min(step, shape[0] - start)
        data = _read_bytes(file, count * row_bytes)
        if len(data) < count * row_bytes:
            raise checks.unreadable(
                source, f"declares {lengths} values but holds fewer. Write the file again."
            )
        block = np.frombuffer(data, kind).reshape(count, *shape[1:])
        rows.append(block.astype(kind.newbyteorder("="), copy=False))
    if file.read(1):
        raise checks.unreadable(
            source, f"declares {lengths} values but holds more. Write the file again."
        )
    return rows.finish()


def _read_bytes(file: Any, size: int) -> bytearray:
    """Returns ``size`` bytes, or fewer bytes at the end of the file."""
    data = bytearray()
    while len(data) < size and (more := file.read(min(_READ, size - len(data)))):
        data += more
    return data


def _make_unreadable_error(source: str) -> Exception:
    return checks.unreadable(source, "is not a readable IDX file. Write the file again.")


def _find_labels(source: str) -> str | None:
    """Returns the path of the label file for a file of images; None if it does not exist."""
    folder, _, name = source.rpartition("/")
    pattern, replacement = _PAIR
    labels, replaced = pattern.subn(replacement, name)
    path = f"{folder}/{labels}" if folder else labels
    return path if replaced and Path(split_member(path)[0]).is_file() else None
