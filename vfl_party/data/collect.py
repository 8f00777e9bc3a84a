"""Collects a stream of rows: ids, labels, numbers and categories, block by block, in the order of
the source.

Cells that a person wrote are read as ``written`` finds. Of other columns the type counts: numbers,
dates and times (as days) are numeric, text and booleans categories. In a column of numbers an empty
cell, NA and the like are missing; in a column of text only an empty cell is.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.cells import dates, number_formats, texts
from vfl_party.data.choice import Chosen, choose
from vfl_party.data.row_arrays import IN_MEMORY, GrowingMatrix, Space
from vfl_party.data.stream import Stream, emptied, without_headers
from vfl_party.data.table import Categories
from vfl_party.data.vocabulary import Vocabulary, decoded, decoded_type

log = logging.getLogger(__name__)

# Of a numeric column that holds days.
DATE = "date"
# The values of a column that ``data.split`` names.
SPLITS = ("train", "validation", "test")
# Rows and cells that are converted at once.
BLOCK, MOST_CELLS = 1 << 16, 1 << 22
# The log says how many rows have been read.
EVERY_S = 10.0
# Cells that are kept of a column that turns out to be written otherwise.
MOST_ODD = 1_000


@dataclass(frozen=True, eq=False)
class Columns:
    """Feature columns by type: float32 numbers, NaN if missing, and categories.

    kinds: {numeric column: ``date``, or the sign that was dropped}, of those that were no bare
    numbers. style: the decimal point, and what may stand between thousands, of cells that were
    text; None of others.
    """

    numeric_NF: npt.NDArray[np.float32]  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...]
    categorical: Categories
    categorical_names: tuple[str, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    style: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """A reader's result, in the order of the source, with ``limit`` applied.

    ids: the columns that are one id together, as they come: each [N] text, None if missing. labels:
    [N] float64 or text (object), or None. features: the party's columns, or pixels: [N, C, H, W],
    or [N, F] if ``image_shape`` says how to arrange them. splits: [N] text of ``SPLITS``, or None.
    notes: what was guessed, a sentence each. id_types: of the id columns in the source, if it
    declares them. separator: see ``Stream``.
    """

    ids: Sequence[Any]
    labels: npt.NDArray[Any] | None
    features: Columns | npt.NDArray[Any]
    splits: npt.NDArray[np.object_] | None = None
    notes: tuple[str, ...] = ()
    id_types: tuple[pa.DataType, ...] = ()
    separator: str | None = None

    def __len__(self) -> int:
        return len(self.ids[0])

    def own_ids(self) -> tuple[pa.Array | pa.ChunkedArray, ...]:
        """Returns the columns of the id as the source has them: whole numbers are such."""
        texts = (
            part if isinstance(part, pa.Array | pa.ChunkedArray) else pa.array(part, pa.string())
            for part in self.ids
        )
        if not self.id_types:
            return tuple(texts)
        return tuple(
            pc.cast(text, kind) if pa.types.is_integer(kind) else text
            for text, kind in zip(texts, self.id_types, strict=True)
        )


def collect(stream: Stream, settings: DataSettings, with_label: bool) -> Rows:
    """Reads a table: the columns that the settings choose. Raises InputError."""
    stream = emptied(without_headers(stream), settings.na)
    chosen, space = (
        choose(stream.source, list(stream.names), settings, with_label),
        Space.of(settings),
    )
    if not stream.as_written:
        if settings.dates is not None:
            text = (
                f"data.dates = {settings.dates!r} is for cells that are text, and the columns "
                "here have types"
            )
            raise checks.unusable(stream.source, f"{text}; remove it, and write dates as dates")
        return _Pass(stream.source, chosen, settings, space).over(_blocks(stream, chosen, settings))
    # Of columns that the sample does not show as they are.
    odd: dict[str, list[str]] = {}
    words: set[str] = set()
    while True:
        rows = _blocks(stream, chosen, settings)
        head = list(_first(rows, number_formats.SAMPLE))
        found = _find(stream, chosen, settings, head, odd, words)
        reading = _Pass(stream.source, chosen, settings, space, found)
        result = reading.over(itertools.chain(head, rows), stream.notes)
        if not reading.odd:
            return replace(result, notes=(*result.notes, *stream.found), separator=stream.separator)
        words |= {name for name, cells in reading.odd.items() if name in odd or not cells}
        odd |= reading.odd


def columns_of(arrow: pa.Table, settings: DataSettings) -> Columns:
    """Returns the feature columns of a table in memory. Raises InputError."""
    chosen = Chosen((), None, tuple(arrow.column_names))
    reading = _Pass(settings.source, chosen, settings, Space.of(settings))
    for batch in arrow.to_batches():
        reading.add(batch)
    return reading.columns(arrow.schema)


def _blocks(stream: Stream, chosen: Chosen, settings: DataSettings) -> Iterator[pa.RecordBatch]:
    """Yields blocks of the chosen columns, of at most ``BLOCK`` rows each and ``limit`` rows in
    all.
    """
    left, names = settings.limit if settings.limit is not None else 1 << 62, chosen.all_names()
    rows = min(BLOCK, max(1, MOST_CELLS // len(names)))
    for batch in stream.blocks(names):
        for start in range(0, min(batch.num_rows, left), rows):
            yield batch.slice(start, min(rows, left - start))
        left -= min(batch.num_rows, left)
        if left == 0:
            return


def _first(blocks: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields blocks until they have ``rows`` rows."""
    seen = 0
    while seen < rows and (batch := next(blocks, None)) is not None:
        seen += batch.num_rows
        yield batch


def _find(
    stream: Stream,
    chosen: Chosen,
    settings: DataSettings,
    head: Sequence[pa.RecordBatch],
    odd: Mapping[str, list[str]],
    words: set[str],
) -> number_formats.Findings:
    """Finds how the columns are written, from the first rows and the cells that did not fit in an
    earlier pass.
    """
    if not head:
        return number_formats.Findings({})
    wanted = [
        name
        for name in (chosen.label, *chosen.features)
        if name and name not in settings.categorical
    ]
    first = pa.Table.from_batches(head).slice(0, number_formats.SAMPLE).select(wanted)
    sample = {
        name: pa.concat_arrays(
            [*pc.cast(first[name], pa.string()).chunks, pa.array(odd.get(name, ()), pa.string())]
        )
        for name in wanted
    }
    marked = stream.separator is None
    commas = stream.separator == ","
    found = number_formats.find(
        stream.source, sample, settings, commas=commas, marked=marked, words=words
    )
    readings = dict(found.readings)
    for name in settings.numeric:
        if isinstance(readings.get(name), number_formats.Words):
            readings[name] = number_formats.Numbers(found.style, marked=marked)
    return replace(found, readings=readings)


class _Pass:
    """One reading of a stream. ``found``: how its cells are written; None if its columns have
    types.

    ``odd``: {column: cells that are not written as its first ones}; the result is of no use then.
    """

    def __init__(
        self,
        source: str,
        chosen: Chosen,
        settings: DataSettings,
        space: Space = IN_MEMORY,
        found: number_formats.Findings | None = None,
    ) -> None:
        self.odd: dict[str, list[str]] = {}
        self._source, self._chosen, self._settings, self._space, self._found = (
            source,
            chosen,
            settings,
            space,
            found,
        )
        self._rows = 0
        self._ids: list[list[pa.Array]] = [[] for _ in chosen.id]
        self._words: dict[str, Vocabulary] = {}
        self._label: list[npt.NDArray[Any]] = []
        self._split: list[npt.NDArray[np.int32]] = []
        # Once the first block has come.
        self._numeric: tuple[str, ...] | None = None
        self._others: tuple[str, ...] = ()
        self._numbers: GrowingMatrix | None = None
        self._codes: GrowingMatrix | None = None

    def over(self, blocks: Iterator[pa.RecordBatch], notes: tuple[str, ...] = ()) -> Rows:
        """Reads all blocks. Raises InputError."""
        schema, said_s = None, time.monotonic()
        for batch in blocks:
            schema = batch.schema
            self.add(batch)
            if time.monotonic() - said_s > EVERY_S:
                log.info(
                    "%s: %s rows are read",
                    self._source,
                    f"{self._rows:,}",
                    extra={"event": "reading"},
                )
                said_s = time.monotonic()
        checks.require_rows(self._source, self._rows)
        if self._found is not None and self._found.points is not None and not self.odd:
            self._found.points.decide()
        assert schema is not None  # noqa: S101 - there are rows
        ids = [pa.chunked_array(each) for each in self._ids]
        said = (*notes, *(self._found.notes if self._found is not None else ()))
        types = tuple(decoded_type(schema.field(name).type) for name in self._chosen.id)
        return Rows(ids, self._labels(), self.columns(schema), self._splits(), said, types)

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows. Raises InputError."""
        for each, name in zip(self._ids, self._chosen.id, strict=True):
            each.append(id_texts(self._source, name, self._text(batch.column(name))))
        if self._chosen.label is not None:
            self._label.append(
                self._label_block(self._chosen.label, batch.column(self._chosen.label))
            )
        if self._chosen.split is not None:
            self._split.append(
                self._split_block(self._chosen.split, batch.column(self._chosen.split))
            )
        numeric = self._begin(batch.schema)
        block_FB = np.empty((len(numeric), batch.num_rows), np.float32)
        # Values beyond float32 become infinite and are refused as such.
        with np.errstate(over="ignore"):
            for row_B, name in zip(block_FB, numeric, strict=True):
                row_B[:] = self._number_block(name, batch.column(name))
        others = self._others
        codes_BK = np.empty((batch.num_rows, len(others)), np.int32)
        for k, name in enumerate(others):
            codes_BK[:, k] = self._codes_of(name, batch.column(name))
        assert self._numbers is not None and self._codes is not None  # noqa: S101, PT018 - begun above
        self._numbers.append(np.ascontiguousarray(block_FB.T))
        self._codes.append(codes_BK)
        self._rows += batch.num_rows

    def columns(self, schema: pa.Schema) -> Columns:
        """Returns the features of all rows."""
        numeric = self._begin(schema)
        others = self._others
        assert self._numbers is not None and self._codes is not None  # noqa: S101, PT018 - begun above
        texts = tuple(self._words[name].texts() if name in self._words else () for name in others)
        words = Categories(self._codes.finish(), texts)
        style = (
            None
            if self._found is None
            else (self._found.style.decimal, self._found.style.thousands)
        )
        return Columns(
            self._numbers.finish(), numeric, words, others, self._kinds(numeric, schema), style
        )

    def _kinds(self, numeric: Sequence[str], schema: pa.Schema) -> dict[str, str]:
        """Returns what the numeric columns held, as far as these were no bare numbers."""
        found = {}
        for name in numeric:
            reading = None if self._found is None else self._found.readings[name]
            if isinstance(reading, dates.Dates) or (
                reading is None and _is_time(schema.field(name).type)
            ):
                found[name] = DATE
            elif isinstance(reading, number_formats.Numbers) and reading.sign:
                found[name] = reading.sign
        return found

    def _begin(self, schema: pa.Schema) -> tuple[str, ...]:
        """Returns the names of the numeric features, which the first block shows. Raises
        InputError.
        """
        if self._numeric is None:
            features = self._chosen.features
            self._numeric = tuple(
                name for name in features if self._is_numeric(name, schema.field(name).type)
            )
            known = set(self._numeric)
            self._others = tuple(name for name in features if name not in known)
            self._numbers = self._space.growing(len(self._numeric), np.float32)
            self._codes = self._space.growing(len(features) - len(self._numeric), np.int32)
        return self._numeric

    def _is_numeric(self, name: str, kind: pa.DataType) -> bool:
        if name in self._settings.categorical:
            return False
        if self._found is not None:
            return not isinstance(self._found.readings[name], number_formats.Words)
        if name in self._settings.numeric or _is_number(kind) or _is_time(kind):
            return True
        if _is_text(kind):
            return False
        what = f"column {name!r} holds {kind}, which is neither number nor text"
        raise checks.unusable(self._source, f"{what}; list it in data.categorical or data.drop")

    def _number_block(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        if self._found is not None:
            return self._written(name, column)
        column = decoded(column)
        if _is_time(column.type):
            return _floats(dates.days(column))
        if _is_number(column.type):
            return _floats(column)
        if pa.types.is_boolean(column.type):
            return _floats(pc.cast(column, pa.int8()))
        if not _is_text(column.type):
            what = f"column {name!r} {self._said('numeric', 'numbers')} and holds {column.type}"
            raise checks.unusable(
                self._source,
                f"{what}; {'correct it' if self._settings.as_trained else 'take it out'}",
            )
        settings = self._settings
        reading = number_formats.Numbers(
            number_formats.Style(settings.decimal or ".", settings.thousands or "")
        )
        numbers = reading.read(pc.cast(column, pa.string()))
        return _floats(numbers) if numbers is not None else self._no_number(name, column, reading)

    def _written(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        """Reads cells as the first ones were written; notes those that are not, to read the column
        otherwise.
        """
        assert self._found is not None  # noqa: S101 - of a stream of text
        reading = self._found.readings[name]
        assert not isinstance(reading, number_formats.Words)  # noqa: S101 - of a column of numbers
        column = pc.cast(column, pa.string())
        values = reading.read(column)
        if values is not None:
            if self._found.points is not None and isinstance(reading, number_formats.Numbers):
                self._found.points.look(name, column, reading)
            return _floats(values)
        if name in self._settings.numeric:
            return self._no_number(name, column, reading)
        if (
            isinstance(reading, dates.Dates)
            and reading.form
            and reading.form == self._settings.dates
        ):
            raise dates.not_all_dates(self._source, name, reading.form)
        kept = self.odd.setdefault(name, [])
        if isinstance(reading, number_formats.Numbers) and len(kept) < MOST_ODD:
            kept += (
                number_formats.unlike(column, reading).slice(0, MOST_ODD - len(kept)).to_pylist()
            )
        return np.full(len(column), np.nan)

    def _no_number(self, name: str, column: pa.Array, reading: Any) -> npt.NDArray[np.float64]:
        where = checks.rows(self._source, self._rows + _first_unread(column, reading) + 1)
        what = (
            f"column {name!r} {self._said('numeric', 'numbers')} and holds text in {where}; "
            "correct the value"
        )
        remedy = "" if self._settings.as_trained else ", or take the column out of data.numeric"
        raise checks.unusable(
            self._source, f"{what}, or list it in data.na if it stands for an empty cell{remedy}"
        )

    def _said(self, key: str, kind: str) -> str:
        """Words why a column must be of a kind: by the party's file, or by the training of which it
        knows nothing.
        """
        return f"held {kind} in training" if self._settings.as_trained else f"is in data.{key}"

    def _text(self, column: pa.Array) -> pa.Array:
        """Returns a column of written cells as they stand, without marks; others unchanged."""
        if self._found is None or not self._found.marked:
            return column
        return texts.plain(pc.cast(column, pa.string()))

    def _codes_of(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        try:
            return self._words.setdefault(name, Vocabulary(self._source, name)).codes(
                self._text(column)
            )
        except pa.ArrowException:
            what = (
                f"column {name!r} {self._said('categorical', 'categories')} and holds {column.type}"
            )
            raise checks.unusable(
                self._source, f"{what}, which cannot be written as text; drop it"
            ) from None

    def _label_block(self, name: str, column: pa.Array) -> npt.NDArray[Any]:
        column = decoded(column)
        if self._found is not None and name not in self._settings.categorical:
            reading = self._found.readings[name]
            if isinstance(reading, number_formats.Numbers):
                return self._written(name, column)
        elif self._found is None and _is_number(column.type):
            return _floats(column)
        if not _is_text(column.type):
            text = f"label column {name!r} holds {column.type}; labels are numbers or text"
            raise checks.unusable(self._source, text)
        return self._codes_of(name, column)

    def _labels(self) -> npt.NDArray[Any] | None:
        name = self._chosen.label
        if name is None:
            return None
        if name in self._words:
            values: npt.NDArray[Any] = self._words[name].all_texts(self._label)
            missing_N = checks.no_text(values)
        else:
            values = np.concatenate(self._label)
            checks.require_finite(self._source, values[:, None], [name])
            missing_N = np.isnan(values)
        if name not in self.odd:
            advice = "leave out the rows without a label"
            checks.require_present(self._source, f"label column {name!r}", missing_N, advice)
        return values

    def _split_block(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        column = decoded(self._text(column))
        text = (
            pc.cast(column, pa.string())
            if _is_text(column.type)
            else pa.nulls(len(column), pa.string())
        )
        codes = (
            pc.index_in(text, value_set=pa.array(SPLITS))
            .fill_null(-1)
            .to_numpy(zero_copy_only=False)
        )
        if (codes < 0).any():
            where = checks.rows(self._source, self._rows + int((codes < 0).argmax()) + 1)
            what = f"column {name!r}, which data.split names, holds something else in {where}"
            raise checks.unusable(self._source, f"{what}; each value is one of {', '.join(SPLITS)}")
        found: npt.NDArray[np.int32] = codes
        return found

    def _splits(self) -> npt.NDArray[np.object_] | None:
        return (
            np.array(SPLITS, object)[np.concatenate(self._split)]
            if self._chosen.split is not None
            else None
        )


def id_texts(source: str, name: str, column: pa.Array) -> pa.Array:
    """Returns ids as text, whole numbers in decimal digits, null if missing. Raises InputError for
    other types.
    """
    column = decoded(column)
    if not (
        pa.types.is_integer(column.type)
        or (_is_text(column.type) and not pa.types.is_boolean(column.type))
    ):
        raise checks.unusable(
            source, f"id column {name!r} holds {column.type}; ids are text or whole numbers"
        )
    return pc.cast(column, pa.large_string())


def label_values(source: str, name: str, column: pa.Array) -> npt.NDArray[Any]:
    """Returns labels as float64 numbers or text. Raises InputError for other types, missing and
    infinite ones.
    """
    reading = _Pass(source, Chosen((), name, ()), DataSettings(source=source))
    reading.add(pa.record_batch({name: column}))
    values = reading._labels()
    assert values is not None  # noqa: S101 - it has a label
    return values


def split_values(source: str, name: str, column: pa.Array) -> npt.NDArray[np.object_]:
    """Returns [N] text: the split of each row, one of ``SPLITS``. Raises InputError if there is any
    other value.
    """
    reading = _Pass(source, Chosen((), None, (), name), DataSettings(source=source))
    reading.add(pa.record_batch({name: column}))
    values = reading._splits()
    assert values is not None  # noqa: S101 - it has a split
    return values


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_boolean(kind)
        or (types.is_dictionary(kind) and _is_text(kind.value_type))
    )


def _floats(column: pa.Array) -> npt.NDArray[np.float64]:
    """Returns [B] float64, NaN for null."""
    values: npt.NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values


def _first_unread(column: pa.Array, reading: Any) -> int:
    """Returns the place of the first cell that ``reading`` cannot read, found by bisection."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if reading.read(column.slice(low, middle - low)) is None
            else (middle, high)
        )
    return low
