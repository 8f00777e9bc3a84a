"""Reads tables that are already in memory (pandas and polars frames, Arrow tables, dicts of NumPy
arrays), and data sets of scikit-learn and torchvision by their names.
"""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.choice import choose_features, without_row
from vfl_party.data.reading import collect, read_columns
from vfl_party.data.sources.arrays import array_rows, channels_first, row_ids
from vfl_party.data.stream import RowStream
from vfl_party.data.table import Rows


def frame_rows(frame: Any, settings: DataSettings, with_label: bool) -> Rows:
    """Reads ids, labels and features from a frame. Raises InputError."""
    source = settings.source
    if is_arrays(frame):
        arrays = {str(name): _to_array(source, name, array) for name, array in frame.items()}
        wanted = {*settings.id, *settings.roles}
        checks.require_names(source, "id", settings.id, list(arrays))
        if with_label and settings.label is None:
            raise checks.unusable(
                source,
                "needs data.label. Name its label array, one of "
                f"{checks.list_names(list(arrays))}.",
            )
        if with_label:
            checks.require_roles(source, settings, list(arrays))
        array_by_column = {
            f"{name}.{j}": name
            for name, a in arrays.items()
            if a.ndim == 2
            for j in range(a.shape[1])
        }
        columns = (
            None
            if settings.columns is None
            else [array_by_column.get(name, name) for name in settings.columns]
        )
        checks.require_names(source, "columns", columns or (), list(arrays))
        checks.require_names(source, "drop", settings.drop, list(arrays))
        chosen_names = arrays.keys() if columns is None else {*columns, *wanted}
        chosen_arrays = {
            name: array
            for name, array in arrays.items()
            if name in chosen_names and name not in settings.drop
        }
        return array_rows(chosen_arrays, settings, with_label)
    arrow = as_arrow(frame, source, settings.id)
    stream = RowStream(
        source,
        tuple(arrow.column_names),
        False,
        lambda names: iter(arrow.select(list(names)).to_batches()),
    )
    return collect(stream, settings, with_label)


def _to_array(source: str, name: object, values: Any) -> np.ndarray[Any, Any]:
    """Converts a value of a dict of arrays to an array. An array of text objects becomes a text
    array.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise checks.unusable(
            source, f"{name!r} cannot become an array ({error}). Give rows of equal length."
        ) from error
    if array.dtype == object and all(isinstance(value, str) for value in array.ravel()):
        return array.astype(str)
    return array


def write_arrays(arrays: Mapping[Any, Any], file: BinaryIO) -> None:
    """Writes a dict of arrays as an NPZ file. The names may be any text. Raises InputError."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, values in arrays.items():
            array = _to_array("data", name, values)
            if array.dtype == object:
                raise checks.unusable(
                    "data", f"{name!r} holds objects. Make all its values numbers, or all text."
                )
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def is_arrays(frame: object) -> bool:
    """Returns whether a frame is a dict of arrays."""
    return isinstance(frame, Mapping)


def is_lazy(frame: object) -> bool:
    """Returns whether a frame is a polars LazyFrame."""
    return hasattr(frame, "collect_schema") and not hasattr(frame, "to_arrow")


def as_arrow(frame: Any, source: str, ids: Sequence[str] = ()) -> pa.Table:
    """Converts a frame to an Arrow table. ``ids``: The levels of a pandas index to keep as columns.
    Raises InputError.
    """
    try:
        if isinstance(frame, pa.Table):
            return frame
        if type(frame).__module__.partition(".")[0] == "pandas":
            index = getattr(getattr(frame, "index", None), "names", ())
            index_names = [name for name in index if name in ids]
            return pa.Table.from_pandas(
                frame.reset_index(index_names) if index_names else frame, preserve_index=False
            )
        if is_lazy(frame):
            raise checks.unusable(source, "is lazy. Call .collect() first.")
        # polars frames have a method ``to_arrow``.
        if hasattr(frame, "to_arrow"):
            return frame.to_arrow()
        return pa.table(frame)
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        match = re.search(r"Conversion failed for column (.+) with type object", str(error))
        if match:
            raise checks.unusable(
                source,
                f"column {match[1]!r} mixes numbers and text. Make all its values numbers, or all "
                "text.",
            ) from error
        reason = f"{error}".partition("\n")[0]
        raise checks.unusable(
            source,
            f"cannot be read as a table (got {type(frame).__name__}: {reason}). Give a pandas or "
            "polars frame, an Arrow table, or a dict of NumPy arrays.",
        ) from error


SKLEARN = ("breast_cancer", "diabetes", "digits", "iris", "wine")


# The column names of the label, and of torchvision's own split.
TARGET, PART = "target", "part"


def read_sklearn(settings: DataSettings, with_label: bool) -> Rows:
    """Reads a data set that is bundled with scikit-learn. ``digits`` has images of 1 x 8 x 8
    pixels, from 0 to 1. Raises InputError.
    """
    name = settings.source.removeprefix("sklearn:")
    if name not in SKLEARN:
        raise checks.unusable(
            settings.source,
            f"is not a bundled set of scikit-learn. Choose one of {', '.join(SKLEARN)}.",
        )
    _check_roles(settings)
    bunch = _load_bunch(name)
    kept_rows = slice(0, settings.first)
    ids = [row_ids(len(bunch.target))[kept_rows]]
    labels = bunch.target[kept_rows].astype(np.float64) if with_label else None
    if name == "digits":
        checks.refuse_column_settings(
            settings.source, settings, ("columns", "drop", "numeric", "categorical")
        )
        return Rows(ids, labels, (bunch.images[kept_rows, None] / 16.0).astype(np.float32))
    features = {str(key): bunch.data[kept_rows, j] for j, key in enumerate(bunch.feature_names)}
    chosen = choose_features(settings.source, list(features), settings)
    return Rows(
        ids, labels, read_columns(pa.table({key: features[key] for key in chosen}), settings)
    )


@lru_cache(maxsize=2)
def _load_bunch(name: str) -> Any:
    """Loads a data set, read-only. It is cached for all parties and runs of a process."""
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    for value in bunch.values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return bunch


def read_torchvision(settings: DataSettings, with_label: bool) -> Rows:
    """Reads an image classification data set of torchvision: the training images, then the test
    images.

    Raises InputError if the data set is unknown, or if its files are missing and may not be
    downloaded.
    """
    source = settings.source
    _check_roles(settings, [PART])
    checks.refuse_column_settings(source, settings, ("columns", "drop", "numeric", "categorical"))
    parts = [_get_pixels(source, part) for part in _open_torchvision(settings)]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    targets = np.concatenate([targets for _, targets in parts])
    if len(pixels) != len(targets) or targets.ndim != 1:
        raise checks.unusable(source, "is not a set of images with one class each. Choose another.")
    kept_rows = slice(0, settings.first)
    images = channels_first(source, pixels[kept_rows], settings.image_shape)
    ids = [row_ids(len(pixels))[kept_rows]]
    # A passive party may use torchvision's split for its own rows.
    splits = np.repeat(
        np.array(("train", "test"), object), [len(pixels_of_part) for pixels_of_part, _ in parts]
    )
    labels = targets[kept_rows].astype(np.float64) if with_label else None
    return Rows(ids, labels, images, splits[kept_rows] if settings.split else None)


def _check_roles(settings: DataSettings, splits: Sequence[str] = ()) -> None:
    if without_row(settings, ()).id:
        raise checks.unusable(
            settings.source, "has no id column, because the row number is the id. Remove data.id."
        )
    checks.require_names(
        settings.source, "label", [settings.label] if settings.label else [], [TARGET]
    )
    for key in ("event", "weight"):
        column = getattr(settings, key)
        checks.require_names(settings.source, key, [column] if column else [], [])
    checks.require_names(settings.source, "labels", settings.labels, [TARGET])
    checks.require_names(
        settings.source, "split", [settings.split] if settings.split else [], splits
    )


def _open_torchvision(settings: DataSettings) -> list[Any]:
    """Opens the training and the test part of a data set."""
    source, name = settings.source, settings.source.removeprefix("torchvision:")
    from torchvision import datasets

    if name not in datasets.__all__:
        raise checks.unusable(
            source,
            "is not a set of torchvision. Choose one such as "
            f"{checks.nearest(name, datasets.__all__)}.",
        )
    kind = getattr(datasets, name)
    parameters = inspect.signature(kind).parameters
    if "download" not in parameters or not {"train", "split"} & parameters.keys():
        raise checks.unusable(
            source, "has no training and test part that can be downloaded. Choose another set."
        )
    choices = (
        [{"train": True}, {"train": False}]
        if "train" in parameters
        else [{"split": "train"}, {"split": "test"}]
    )
    try:
        return [
            kind(settings.download_dir, download=settings.download, **choice) for choice in choices
        ]
    except Exception:  # noqa: BLE001 - each data set raises different errors for missing or damaged files
        if settings.download:
            raise checks.unreadable(
                source,
                f"could not be downloaded to {settings.download_dir} or read. Check the network "
                "and data.download_dir.",
            ) from None
        raise checks.unreadable(
            source,
            f"its files are missing or damaged in data.download_dir ({settings.download_dir}). Set "
            "data.download = true.",
        ) from None


def _get_pixels(source: str, part: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    targets = getattr(part, "targets", None)
    targets = getattr(part, "labels", None) if targets is None else targets
    pixels = getattr(part, "data", None)
    if pixels is None or targets is None:
        raise checks.unusable(
            source, "does not hold its images and classes in memory. Choose another set."
        )
    return np.asarray(pixels), np.asarray(targets)
