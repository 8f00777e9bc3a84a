"""Reads IDX files, MNIST's format: a magic number, the length of each dimension, the values."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import divided
from vfl_party.data import checks
from vfl_party.data.columns import Rows
from vfl_party.data.sources.arrays import array_rows, named_arrays
from vfl_party.data.sources.packed import BROKEN, open_bytes

IMAGES, LABELS, VALUES = "images", "labels", "values"
_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_READ = 1 << 20
# In the name of a file of images, and in that of its labels.
_PAIR = (re.compile("images(.)idx3"), r"labels\1idx1")


def read_idx(settings: DataSettings, with_label: bool) -> Rows:
    """Reads a file: three dimensions or more are the array ``images``, fewer are ``values``.

    Beside ``…images-idx3-ubyte`` the file ``…labels-idx1-ubyte`` is the array ``labels``. Raises
    InputError.
    """
    source = settings.source
    values = read_array(source)
    arrays = {IMAGES if values.ndim > 2 else VALUES: values}
    beside = _labels_of(source)
    if beside is not None:
        arrays[LABELS] = read_array(beside)
    return array_rows(
        named_arrays(settings, with_label, list(arrays), arrays.__getitem__), settings, with_label
    )


def read_array(source: str) -> npt.NDArray[Any]:
    """Returns the array of a file, which is unpacked into memory, in this machine's order of bytes.
    Raises InputError.
    """
    try:
        with open_bytes(source) as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or not head[3]:
                raise checks.unreadable(
                    source, "does not begin as an IDX file does; correct data.source or data.format"
                )
            kind = np.dtype(_TYPES[head[2]])
            shape = tuple(np.frombuffer(file.read(4 * head[3]), ">u4").tolist())
            size = math.prod(shape) * kind.itemsize
            data = bytearray()
            # No more than there is, whatever the file says.
            while len(data) <= size and (more := file.read(min(_READ, size + 1 - len(data)))):
                data += more
    except (*BROKEN, ValueError):
        raise checks.unreadable(
            source, "is not an IDX file that can be read to its end; write it again"
        ) from None
    if len(shape) < head[3] or len(data) != size:
        said = " x ".join(map(str, shape))
        much = "more" if len(data) > size else "less"
        raise checks.unreadable(
            source, f"says that it holds {said} values, and holds {much}; write it again"
        )
    array = np.frombuffer(data, kind).reshape(shape)
    return array.astype(kind.newbyteorder("="), copy=False)


def _labels_of(source: str) -> str | None:
    """Returns the file of labels beside one of images; None if there is none."""
    folder, _, name = source.rpartition("/")
    pattern, replacement = _PAIR
    beside, found = pattern.subn(replacement, name)
    path = f"{folder}/{beside}" if folder else beside
    return path if found and Path(divided(path)[0]).is_file() else None
