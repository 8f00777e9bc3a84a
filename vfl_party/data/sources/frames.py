"""Reads tables that are already in memory: pandas and polars frames, Arrow tables, dicts of NumPy
arrays.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.reading import collect
from vfl_party.data.sources.arrays import array_rows
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
