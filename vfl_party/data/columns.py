"""Reads CSV and Parquet files and sorts their columns into id, label, numbers and categories.

CSV cells are read as text, so that the id '007' stays '007'. A column is numeric if all of its cells are numbers, not
only the first thousand. In a numeric column an empty cell, NA, N/A, NaN, null and None are missing; in a column of text
only an empty cell is.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.views import column_run

SPLITS = ("train", "validation", "test")  # the values of a column that ``data.split`` names
_MISSING_NUMBER = ("", "NA", "N/A", "n/a", "na", "NaN", "nan", "NAN", "null", "NULL", "None", "none")


@dataclass(frozen=True, eq=False)
class Rows:
    """A reader's result, in the order of the source, with ``limit`` applied.

    ids: the columns that are one id together, as they come: each [N] text, None if missing. labels: [N] float64 or text
    (object), or None. features: an Arrow table of the party's columns, or pixels: [N, C, H, W], or [N, F] if
    ``image_shape`` says how to arrange them. splits: [N] text of ``SPLITS``, or None.
    """

    ids: Sequence[Sequence[str | None]]
    labels: npt.NDArray[Any] | None
    features: Any
    splits: npt.NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.ids[0])


@dataclass(frozen=True, eq=False)
class Columns:
    """Feature columns by type: float32 numbers, NaN if missing, and [N, K] text, None if missing."""

    numeric_NF: npt.NDArray[np.float32]  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...]
    categorical: npt.NDArray[np.object_]
    categorical_names: tuple[str, ...]


def read_csv(settings: DataSettings, with_label: bool) -> Rows:
    """Reads a ``.csv`` or ``.csv.gz`` file: a header line, UTF-8, separated by commas. Raises InputError."""
    source = settings.source
    names = csv_header(source)
    chosen = choose(names, settings, with_label)
    arrow = csv_text(source, names, chosen.all_names())
    arrow = arrow if settings.limit is None else arrow.slice(0, settings.limit)
    for name in chosen.all_names():
        if name not in (*chosen.id, *settings.categorical, *settings.numeric):
            numbers = parse_numbers(arrow[name])
            if numbers is not None:
                arrow = arrow.set_column(arrow.column_names.index(name), name, numbers)
    return chosen.rows(source, arrow)


def read_parquet(settings: DataSettings, with_label: bool) -> Rows:
    """Reads a Parquet file; columns have the types that it declares. Raises InputError."""
    source = settings.source
    try:
        with parquet.ParquetFile(source) as file:
            names = list(file.schema_arrow.names)
            chosen = choose(names, settings, with_label)
            arrow = file.read(columns=chosen.all_names(), use_threads=False)
        arrow.validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        raise checks.unreadable(source, "is not a Parquet file that can be read; write it again") from None
    arrow = arrow if settings.limit is None else arrow.slice(0, settings.limit)
    return chosen.rows(source, arrow)


# --- which columns --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """The names of the columns to read."""

    id: tuple[str, ...]
    label: str | None
    features: tuple[str, ...]
    split: str | None = None

    def all_names(self) -> list[str]:
        return [*self.id, *(each for each in (self.label, self.split) if each), *self.features]

    def rows(self, source: str, arrow: pa.Table) -> Rows:
        """Makes ``Rows`` of a table with these columns. Raises InputError for unusable ids or labels."""
        checks.require_rows(source, arrow.num_rows)
        labels = label_values(source, self.label, arrow[self.label]) if self.label else None
        splits = split_values(source, self.split, arrow[self.split]) if self.split else None
        ids = [id_texts(source, name, arrow[name]) for name in self.id]
        return Rows(ids, labels, arrow.select(list(self.features)), splits)


def choose(names: list[str], settings: DataSettings, with_label: bool) -> Chosen:
    """Chooses id, label and feature columns, in the order of ``data.columns`` or of the file. Raises InputError."""
    source = settings.source
    if not settings.id:
        raise checks.unusable(source, f"needs data.id, the name of its id column, one of {checks.listed(names)}")
    if with_label and settings.label is None:
        raise checks.unusable(source, f"needs data.label, the name of its label column, one of {checks.listed(names)}")
    doubles = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if doubles:
        raise checks.unusable(source, f"has two columns called {doubles[0]!r}; rename one")
    checks.require_names(source, "id", settings.id, names)
    if with_label:
        checks.require_roles(source, settings, names)
    features = choose_features(names, settings, leave_out=(*settings.id, settings.label, settings.split))
    label, split = (settings.label, settings.split) if with_label else (None, None)
    return Chosen(settings.id, label, features, split)


def choose_features(
    names: Sequence[str], settings: DataSettings, *, leave_out: tuple[str | None, ...] = ()
) -> tuple[str, ...]:
    """Chooses the party's feature columns: listed ones or all, without ``leave_out`` and ``drop``, cut to its view."""
    source = settings.source
    for key in ("columns", "drop", "numeric", "categorical"):
        checks.require_names(source, key, getattr(settings, key) or (), names)
    both = sorted(set(settings.numeric) & set(settings.categorical))
    if both:
        raise checks.unusable(source, f"column {both[0]!r} is in data.numeric and in data.categorical; take one out")
    left_out = {*leave_out, *settings.drop}
    wanted = names if settings.columns is None else dict.fromkeys(settings.columns)
    features = tuple(name for name in wanted if name not in left_out)
    return features[column_run(source, len(features), settings.view)]


# --- CSV text -------------------------------------------------------------------------------------------------------


def csv_header(source: str) -> list[str]:
    """Reads the column names of a CSV file. Raises InputError."""
    try:
        with io.TextIOWrapper(_open(source), encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file))
    except StopIteration:
        raise checks.unreadable(source, "is empty; its first line must name the columns") from None
    except (OSError, ValueError, csv.Error):
        raise _not_csv(source) from None


def csv_text(source: str, names: list[str], wanted: list[str]) -> pa.Table:
    """Reads the wanted columns of a CSV file as text. Raises InputError; for too few or many cells it names the row."""
    ragged: list[Any] = []

    def note(row: Any) -> str:
        ragged.append(row)
        return "error"

    try:
        with _open(source) as file:
            return arrow_csv.read_csv(
                file,
                arrow_csv.ReadOptions(use_threads=False, block_size=1 << 24),
                arrow_csv.ParseOptions(newlines_in_values=True, invalid_row_handler=note),
                arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), include_columns=wanted),
            )
    except (pa.ArrowException, OSError):
        if ragged:
            row = ragged[0]
            where = checks.rows(source, row.number - 1)
            what = f"{where} has {row.actual_columns} cells, but the header has {row.expected_columns}"
            raise checks.unreadable(source, f"{what}; correct it") from None
        raise _not_csv(source) from None


def _open(source: str) -> Any:
    return pa.input_stream(source, compression="gzip" if source.lower().endswith(".gz") else None)


def _not_csv(source: str) -> Exception:
    kind = "gzip-compressed CSV" if source.lower().endswith(".gz") else "CSV"
    return checks.unreadable(source, f"is not a {kind} file in UTF-8 that can be read to its end; write it again")


# --- values ---------------------------------------------------------------------------------------------------------


def parse_numbers(text: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Parses text as float64, null if a value is missing; returns None if some cell is no number."""
    trimmed = pc.utf8_trim_whitespace(text)
    missing = pc.is_in(trimmed, value_set=pa.array(_MISSING_NUMBER, trimmed.type))
    try:
        return pc.cast(pc.if_else(missing, pa.scalar(None, trimmed.type), trimmed), pa.float64())
    except pa.ArrowInvalid:
        return None


def _first_text_row(text: pa.ChunkedArray) -> int:
    """Returns the row, from 1, of the first cell that is no number, found by bisection."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if parse_numbers(text.slice(low, middle - low)) is None else (middle, high)
    return low + 1


def split_columns(arrow: pa.Table, settings: DataSettings) -> Columns:
    """Sorts columns by ``numeric`` and ``categorical``; else numbers are numeric, text and booleans categories.

    Raises InputError if a column is neither, or if a column that must be numeric holds text.
    """
    source = settings.source
    numbers: dict[str, npt.NDArray[np.float64]] = {}
    texts: dict[str, npt.NDArray[np.object_]] = {}
    for name in arrow.column_names:
        column = _plain(arrow[name])
        if name in settings.categorical:
            texts[name] = _demanded_texts(source, name, column)
        elif name in settings.numeric:
            numbers[name] = _demanded_numbers(source, name, column)
        elif _is_number(column.type):
            numbers[name] = _float_values(column)
        elif _is_text(arrow[name].type) or pa.types.is_dictionary(arrow[name].type):
            texts[name] = _category_texts(column)
        else:
            what = f"column {name!r} holds {column.type}, which is neither number nor text"
            raise checks.unusable(source, f"{what}; list it in data.categorical or data.drop")
    numeric_FN = np.empty((len(numbers), arrow.num_rows), np.float32)
    with np.errstate(over="ignore"):  # values beyond float32 become infinite and are refused as such
        for row_N, values_N in zip(numeric_FN, numbers.values(), strict=True):
            row_N[:] = values_N
    categorical_NK = np.empty((arrow.num_rows, len(texts)), object)
    for k, text_N in enumerate(texts.values()):
        categorical_NK[:, k] = text_N
    return Columns(np.ascontiguousarray(numeric_FN.T), tuple(numbers), categorical_NK, tuple(texts))


def id_texts(source: str, name: str, column: pa.ChunkedArray) -> list[str | None]:
    """Returns ids as text, whole numbers in decimal digits, None if missing. Raises InputError for other types."""
    column = _plain(column)
    if not (pa.types.is_integer(column.type) or (_is_text(column.type) and not pa.types.is_boolean(column.type))):
        raise checks.unusable(source, f"id column {name!r} holds {column.type}; ids are text or whole numbers")
    ids: list[str | None] = pc.cast(column, pa.string()).to_pylist()
    return ids


def label_values(source: str, name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns labels as float64 numbers or text. Raises InputError for other types, missing and infinite ones."""
    column = _plain(column)
    values: npt.NDArray[Any]
    if _is_number(column.type):
        values = _float_values(column)
        checks.require_finite(source, values[:, None], [name])
        missing_N = np.isnan(values)
    elif _is_text(column.type):
        values = _category_texts(column)
        missing_N = checks.no_text(values)
    else:
        raise checks.unusable(source, f"label column {name!r} holds {column.type}; labels are numbers or text")
    checks.require_present(source, f"label column {name!r}", missing_N, "leave out the rows without a label")
    return values


def split_values(source: str, name: str, column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """Returns [N] text: the split of each row, one of ``SPLITS``. Raises InputError if there is any other value."""
    column = _plain(column)
    values = _category_texts(column) if _is_text(column.type) else np.full(len(column), None, object)
    wrong_N = ~np.isin(values.astype(str), SPLITS)
    if wrong_N.any():
        where = checks.rows(source, int(wrong_N.argmax()) + 1)
        what = f"column {name!r}, which data.split names, holds something else in {where}"
        raise checks.unusable(source, f"{what}; each value is one of {', '.join(SPLITS)}")
    return values


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decodes a dictionary-encoded column into its values; returns others unchanged."""
    return pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind) or types.is_boolean(kind)
    )


def _float_values(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Returns [N] float64, NaN for null."""
    values: npt.NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy()
    return values


def _demanded_numbers(source: str, name: str, column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    if _is_number(column.type) or pa.types.is_boolean(column.type):
        return _float_values(pc.cast(column, pa.int8()) if pa.types.is_boolean(column.type) else column)
    if not _is_text(column.type):
        raise checks.unusable(source, f"column {name!r} is in data.numeric and holds {column.type}; take it out")
    numbers = parse_numbers(column)
    if numbers is None:
        where = checks.rows(source, _first_text_row(column))
        what = f"column {name!r} is in data.numeric and holds text in {where}"
        raise checks.unusable(source, f"{what}; correct the value, or take the column out of data.numeric")
    return _float_values(numbers)


def _demanded_texts(source: str, name: str, column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    try:
        return _category_texts(column)
    except pa.ArrowException:
        what = f"column {name!r} is in data.categorical and holds {column.type}, which cannot be written as text"
        raise checks.unusable(source, f"{what}; drop it") from None


def _category_texts(column: pa.ChunkedArray) -> npt.NDArray[np.object_]:
    """Returns [N] text, None if null or empty; whole floats lose their '.0', so that 1 is one category in all files."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        with contextlib.suppress(pa.ArrowInvalid):
            column = pc.cast(column, pa.int64())
    text = pc.cast(column, pa.string())
    text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
    values: npt.NDArray[np.object_] = text.to_numpy()
    return values
