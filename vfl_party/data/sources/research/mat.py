"""Reads MATLAB's MAT files up to version 7."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.arrays import array_rows, load_arrays
from vfl_party.data.table import Rows

# The first bytes of a file of version 7.3, whose format is HDF5.
_HDF5 = b"MATLAB 7.3"
_BYTES = {"double": 8, "single": 4, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4}
_BYTES |= {"int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "logical": 1, "char": 1}
# The maximum compression ratio of zlib.
_MAX_UNPACKED = 1032


def read_mat(settings: DataSettings, with_label: bool) -> Rows:
    """Reads the variables of a file with ``array_rows``. A matrix with one row or one column
    becomes one-dimensional.

    If the rows of images are their last dimension, as in SVHN, it becomes the first. All data are
    in memory. Raises InputError.
    """
    variables = _list_variables(settings.source)

    def read(name: str) -> npt.NDArray[Any]:
        return _read_variable(settings.source, name, variables[name])

    arrays = _move_rows_first(load_arrays(settings, with_label, list(variables), read))
    return array_rows(arrays, settings, with_label)


def _list_variables(source: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the shape and the class of each variable. Raises InputError."""
    import scipy.io

    with Path(source).open("rb") as file:
        if file.read(len(_HDF5)) == _HDF5:
            raise checks.unreadable(
                source,
                'is of version 7.3, which is not supported. Write it again with save(…, "-v7").',
            )
    try:
        declared = scipy.io.whosmat(source)
    except Exception:  # noqa: BLE001 - each kind of damage raises another error
        raise _make_unreadable_error(source) from None
    return {name: (tuple(shape), kind) for name, shape, kind in declared}


def _read_variable(
    source: str, name: str, declared: tuple[tuple[int, ...], str]
) -> npt.NDArray[Any]:
    import scipy.io

    shape, kind = declared
    if kind not in _BYTES:
        raise checks.unusable(
            source,
            f"array {name!r} must hold numbers or text (got class {kind}). Convert it, a sparse "
            "array with full(…).",
        )
    if not shape:
        # Each array of a valid file has dimensions. Without them, SciPy crashes on text.
        raise _make_unreadable_error(source)
    max_bytes = Path(source).stat().st_size * _MAX_UNPACKED
    if math.prod(shape) * _BYTES[kind] > max_bytes:
        raise checks.unreadable(
            source,
            f"array {name!r} declares more values than the file holds. Write the file again.",
        )
    try:
        require_known_types(source)
        array: npt.NDArray[Any] = scipy.io.loadmat(source, variable_names=[name])[name]
    except Exception:  # noqa: BLE001 - each kind of damage raises another error
        raise _make_unreadable_error(source) from None
    if kind == "char":
        return np.char.rstrip(array)
    return array.reshape(-1) if array.ndim == 2 and 1 in array.shape else array


def read_variables(source: str, names: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Returns the variables of these names, with rows as the first dimension, as in ``read_mat``.
    Raises InputError.
    """
    variables = _list_variables(source)
    checks.require_names(source, "columns", names, list(variables), noun="array")
    arrays = {name: _read_variable(source, name, variables[name]) for name in names}
    return list(_move_rows_first(arrays).values())


def _move_rows_first(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Moves the rows of images to the first dimension. Rows are recognised by their number, which
    other arrays have as their length.
    """
    counts = {len(array) for array in arrays.values() if array.ndim in (1, 2)}
    return {
        name: np.moveaxis(array, -1, 0)
        if array.ndim > 2 and len(array) not in counts and array.shape[-1] in counts
        else array
        for name, array in arrays.items()
    }


def _make_unreadable_error(source: str) -> Exception:
    return checks.unreadable(
        source, 'is not a readable MAT file. Write it again with save(…, "-v7").'
    )


# Checks the types that a MAT file of version 5 to 7 declares, because an unknown type may crash
# SciPy and the process.
#
# The format is described in MATLAB's "MAT-File Format", Level 5: each element is a tag (its type
# and size) and data.

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
