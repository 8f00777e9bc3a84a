"""Reads files of arrays: NPZ files, IDX files (MNIST's format: a magic number, the length of each
dimension, the values), and MATLAB's MAT files up to version 7.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import split_member
from vfl_party.data import checks
from vfl_party.data.choice import choose_features, reads_split, without_row
from vfl_party.data.reading import id_texts, read_columns, read_labels, read_splits
from vfl_party.data.row_arrays import Space, parts_of, release, rows_at_once
from vfl_party.data.sources.files import BROKEN, open_bytes
from vfl_party.data.table import Columns, Rows

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
        raise _make_mat_error(source) from None
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
        raise _make_mat_error(source)
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
        raise _make_mat_error(source) from None
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


def _make_mat_error(source: str) -> Exception:
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
        raise _make_idx_error(source) from None


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
        raise _make_idx_error(source)
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


def _make_idx_error(source: str) -> Exception:
    return checks.unreadable(source, "is not a readable IDX file. Write the file again.")


def _find_labels(source: str) -> str | None:
    """Returns the path of the label file for a file of images; None if it does not exist."""
    folder, _, name = source.rpartition("/")
    pattern, replacement = _PAIR
    labels, replaced = pattern.subn(replacement, name)
    path = f"{folder}/{labels}" if folder else labels
    return path if replaced and Path(split_member(path)[0]).is_file() else None


# The maximum compression ratios in a ZIP file. DEFLATE encodes up to 258 bytes in two bits.
_RATIOS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}


def read_npz(settings: DataSettings, with_label: bool) -> Rows:
    """Reads arrays of an NPZ file; see ``array_rows``. Raises InputError."""
    return array_rows(_load_file(settings, with_label), settings, with_label)


def array_rows(
    arrays: dict[str, npt.NDArray[Any]], settings: DataSettings, with_label: bool
) -> Rows:
    """Reads ids, labels and features from named arrays. ``data.columns`` names the feature arrays
    of a file.

    Arrays of one or two dimensions are columns, named after the array: ``x``, or ``x.0``, ``x.1``,
    …. An array of three or four dimensions holds images, [N, H, W], [N, H, W, C] or [N, C, H, W].
    Raises InputError.
    """
    source, settings = settings.source, without_row(settings, list(arrays))
    names = [name for name in arrays if name not in (*settings.id, *settings.roles)]
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise checks.unusable(
            source, f"arrays must have the same number of rows (got {counts}). Make them equal."
        )
    n = next(iter(lengths.values()), 0)
    checks.require_rows(source, n)
    kept_rows = slice(0, settings.first)
    columns = [_to_arrow(arrays[name].reshape(n)[kept_rows]) for name in settings.id]
    ids = [
        id_texts(source, name, column) for name, column in zip(settings.id, columns, strict=True)
    ]
    types = tuple(column.type for column in columns) or (pa.int64(),)
    labels = splits = None
    if with_label and settings.label is not None:
        labels = read_labels(
            source,
            settings.label,
            _to_arrow(arrays[settings.label].reshape(n)[kept_rows]),
            settings.unlabelled,
        )
    beside = {
        name: read_labels(source, name, _to_arrow(arrays[name].reshape(n)[kept_rows]), "refuse")
        for name in (settings.beside if with_label else ())
    }
    if settings.split is not None and reads_split(settings, with_label):
        splits = read_splits(
            source, settings.split, _to_arrow(arrays[settings.split].reshape(n)[kept_rows])
        )
    features = {name: arrays[name][kept_rows] for name in names}
    first_array = next(iter(features.values()), None)
    if (
        len(features) == 1
        and first_array is not None
        and (first_array.ndim > 2 or (first_array.ndim == 2 and settings.image_shape))
    ):
        checks.refuse_column_settings(source, settings, ("numeric", "categorical"))
        images = (
            first_array
            if first_array.ndim == 2
            else channels_first(source, first_array, settings.image_shape)
        )
        features_read: Columns | npt.NDArray[Any] = images
    else:
        features_read = array_columns(features, settings)
    numbers = [] if ids else [row_ids(n)[kept_rows]]
    return Rows(
        ids or numbers,
        labels,
        features_read,
        splits,
        id_types=types,
        beside=beside,
        numbered=not ids,
    )


def row_ids(n: int) -> list[str]:
    """Returns row numbers from 0 as ids. They have leading zeros, so that they sort in the order of
    the rows.
    """
    width = len(str(max(n - 1, 0)))
    return [f"{row:0{width}d}" for row in range(n)]


def array_columns(arrays: dict[str, npt.NDArray[Any]], settings: DataSettings) -> Columns:
    """Converts arrays of one or two dimensions to columns, and selects the party's view. Raises
    InputError.
    """
    columns: dict[str, Any] = {}
    for name, array in arrays.items():
        if array.ndim > 2:
            raise checks.unusable(
                settings.source,
                f"array {name!r} holds images and cannot be joined with other arrays. Name it "
                "alone in data.columns.",
            )
        parts = (
            {name: array}
            if array.ndim == 1
            else {f"{name}.{j}": array[:, j] for j in range(array.shape[1])}
        )
        columns |= {key: _to_arrow(part) for key, part in parts.items()}
    all_columns = settings.model_copy(update={"columns": None, "drop": ()})
    chosen = choose_features(settings.source, list(columns), all_columns)
    return read_columns(pa.table({name: columns[name] for name in chosen}), settings)


def channels_first(
    source: str, images: npt.NDArray[Any], shape: tuple[int, int, int] | None = None
) -> npt.NDArray[Any]:
    """Converts images [N, H, W] or [N, H, W, C] to [N, C, H, W]. ``shape`` (C, H, W) decides if
    both orders of the dimensions are possible.

    Raises InputError if the channels are ambiguous.
    """
    if images.dtype.kind not in "biuf":
        raise checks.unusable(
            source, f"the images must hold numbers (got {images.dtype}). Convert the pixels."
        )
    if 0 in images.shape[1:]:
        raise checks.unusable(source, "the images have no pixels. Write the file again.")
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        raise checks.unusable(
            source,
            f"the images must have 3 or 4 dimensions (got {images.ndim}). Give [N, H, W] or "
            "[N, H, W, C].",
        )
    moved = images.transpose(0, 3, 1, 2)
    fits_first, fits_last = images.shape[1] in (1, 3, 4), moved.shape[1] in (1, 3, 4)
    if shape is not None and shape in (images.shape[1:], moved.shape[1:]):
        fits_first, fits_last = images.shape[1:] == shape, images.shape[1:] != shape
    if fits_first == fits_last:
        raise checks.unusable(
            source,
            f"the channels of images of {' x '.join(map(str, images.shape[1:]))} are ambiguous. "
            "Set data.image_shape to [C, H, W].",
        )
    return images if fits_first else moved


def _load_file(settings: DataSettings, with_label: bool) -> dict[str, npt.NDArray[Any]]:
    """Loads the arrays of an NPZ file that the settings name."""
    source = settings.source
    try:
        with Path(source).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            space = Space.of(settings)
            return load_arrays(
                settings, with_label, list(file.files), lambda name: _read_member(file, name, space)
            )
    except (
        OSError,
        ValueError,
        EOFError,
        AttributeError,
        TypeError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ):
        raise checks.unreadable(
            source,
            "is not a readable NPZ file of plain arrays without pickled objects. Write it again "
            "with numpy.savez.",
        ) from None


def load_arrays(
    settings: DataSettings,
    with_label: bool,
    names: list[str],
    read: Callable[[str], npt.NDArray[Any]],
) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays that the settings choose among ``names``, read one by one. Raises
    InputError.
    """
    source, settings = settings.source, without_row(settings, names)
    chosen_names = _choose_names(names, settings, with_label)
    arrays = {name: _check_array(source, name, read(name)) for name in chosen_names}
    ids = [("id", name) for name in settings.id]
    others = [(settings.role_beside(name), name) for name in settings.beside]
    for role, name in (*ids, ("label", settings.label), *others, ("split", settings.split)):
        if name in arrays and arrays[name].size != len(arrays[name]):
            raise checks.unusable(
                source, f"{role} array {name!r} has several values a row. Give one value a row."
            )
    return arrays


def _read_member(file: Any, name: str, space: Space) -> npt.NDArray[Any]:
    """Reads an array of an open NPZ file. Images are read in parts, to limit memory."""
    with file.zip.open(f"{name}.npy") as raw:
        version = np.lib.format.read_magic(raw)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0}.get(
            version, np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read_header(raw)
        # Checked before memory is allocated, because a small file can declare an array of any size.
        if math.prod(shape) * dtype.itemsize > _max_bytes(file, f"{name}.npy"):
            raise ValueError(f"the array is larger than its file allows (got shape {shape})")
        if len(shape) < 3 or fortran or dtype.hasobject or 0 in shape:
            array: npt.NDArray[Any] = file[name]
            return array
        into = space.empty(shape, dtype)
        for part in parts_of(into):
            rows = into[part]
            cells = np.frombuffer(raw.read(rows.nbytes), dtype)
            into[part] = cells.reshape(rows.shape)
            release(into)
    return into


def _max_bytes(file: Any, member: str) -> int:
    """Returns the maximum size in bytes of a member of an open NPZ file."""
    info, size = file.zip.getinfo(member), os.fstat(file.zip.fp.fileno()).st_size
    ratio = _RATIOS.get(info.compress_type)
    return int(info.file_size if ratio is None else min(info.file_size, ratio * size))


def _choose_names(names: list[str], settings: DataSettings, with_label: bool) -> list[str]:
    source = settings.source
    if with_label and settings.label is None:
        raise checks.unusable(
            source, f"needs data.label. Name its label array, one of {checks.list_names(names)}."
        )
    checks.require_names(source, "id", settings.id, names, noun="array")
    if with_label:
        checks.require_roles(source, settings, names, noun="array")
    elif reads_split(settings, with_label):
        checks.require_names(source, "split", [settings.split or ""], names, noun="array")
    split = settings.split if reads_split(settings, with_label) else None
    labels = (settings.label, *settings.beside) if with_label else ()
    needed = (*settings.id, *labels, split)
    for key, listed_names in (("columns", settings.columns or ()), ("drop", settings.drop)):
        checks.require_names(source, key, listed_names, names, noun="array")
    left_out = {*settings.id, *settings.roles, *settings.drop}
    features = [name for name in dict.fromkeys(settings.columns or names) if name not in left_out]
    if settings.columns == ():
        features = []
    if settings.columns is None and len(features) > 1:
        raise checks.unusable(
            source,
            f"has several arrays, {checks.list_names(features)}. Name the feature arrays in "
            "data.columns.",
        )
    return [*(name for name in needed if name is not None), *features]


def _check_array(source: str, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype.kind not in "biufUS" or array.ndim == 0:
        raise checks.unusable(
            source,
            f"array {name!r} must hold numbers or text, one entry a row (got {array.dtype}). "
            "Convert it.",
        )
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    # Converted to the byte order of this machine.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _to_arrow(array_N: npt.NDArray[Any]) -> pa.Array:
    """Converts an array to an Arrow column. Booleans become the numbers 0 and 1."""
    return pa.array(array_N.astype(np.uint8) if array_N.dtype.kind == "b" else array_N)
