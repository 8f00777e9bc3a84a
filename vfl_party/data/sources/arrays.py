"""Reads named arrays, such as those of NPZ files without pickled objects."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.choice import choose_features, reads_split, without_row
from vfl_party.data.reading import id_texts, read_columns, read_labels, read_splits
from vfl_party.data.row_arrays import Space, parts_of, release
from vfl_party.data.table import Columns, Rows

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
