"""One pass over a stream of rows: its ids, labels, numbers and categories, block by block."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.cells import dates, number_formats, texts
from vfl_party.data.cells.arrow_types import floats, is_number, is_text, is_time
from vfl_party.data.choice import ColumnChoice
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.ids import GrowingTexts
from vfl_party.data.row_arrays import IN_MEMORY, GrowingMatrix, Space
from vfl_party.data.table import Categories
from vfl_party.data.vocabulary import Vocabulary, decode, value_type

log = logging.getLogger(__name__)

# Kind of a numeric column that holds days.
DATE = "date"
# The values of a column that ``data.split`` names.
SPLITS = ("train", "validation", "test")
# Seconds between log lines about the number of rows read.
LOG_EVERY_S = 10.0
# Maximum number of cells kept of a column that is written in another way than its first cells.
MAX_ODD = 1_000


class Reading:
    """One pass over a stream. ``findings``: how its cells are written; None if its columns have
    types.

    ``odd``: {column: cells that are written in another way than the first ones}; if not empty, the
    result must be discarded.
    """

    def __init__(
        self,
        source: str,
        chosen: ColumnChoice,
        settings: DataSettings,
        space: Space = IN_MEMORY,
        findings: number_formats.Findings | None = None,
    ) -> None:
        self.odd: dict[str, list[str]] = {}
        self._source, self._chosen, self._settings, self._space, self._found = (
            source,
            chosen,
            settings,
            space,
            findings,
        )
        self._features = frozenset(chosen.features)
        self._rows = 0
        self._ids = [GrowingTexts(space) for _ in chosen.id]
        self._words: dict[str, Vocabulary] = {}
        # Labels and other role columns, known after the first block.
        self._values: dict[str, GrowingMatrix] = {}
        self._split: list[npt.NDArray[np.int32]] = []
        # Names of the numeric and other features, known after the first block.
        self._numeric: tuple[str, ...] | None = None
        self._others: tuple[str, ...] = ()
        self._numbers: GrowingMatrix | None = None
        self._codes: GrowingMatrix | None = None

    def read(self, blocks: Iterator[pa.RecordBatch], notes: tuple[str, ...] = ()) -> Rows:
        """Reads all blocks. Raises InputError."""
        schema, logged_s = None, time.monotonic()
        for batch in blocks:
            schema = batch.schema
            self.add(batch)
            if time.monotonic() - logged_s > LOG_EVERY_S:
                log.info(
                    "%s: %s rows are read",
                    self._source,
                    f"{self._rows:,}",
                    extra={"event": "reading"},
                )
                logged_s = time.monotonic()
        checks.require_rows(self._source, self._rows)
        if self._found is not None and self._found.points is not None and not self.odd:
            self._found.points.decide()
        assert schema is not None  # noqa: S101 - there are rows
        all_notes = [*notes, *(self._found.notes if self._found is not None else ())]
        all_notes += filter(
            None, (vocabulary.describe_shared() for vocabulary in self._words.values())
        )
        types = tuple(value_type(schema.field(name).type) for name in self._chosen.id)
        return Rows(
            [ids.finish() for ids in self._ids],
            self.labels(),
            self.columns(schema),
            self.splits(),
            tuple(all_notes),
            types,
            beside={name: self._values_of(name) for name in self._chosen.beside},
        )

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows. Raises InputError."""
        for ids, name in zip(self._ids, self._chosen.id, strict=True):
            ids.append(id_texts(self._source, name, self._text(batch.column(name))))
        label = () if self._chosen.label is None else (self._chosen.label,)
        for name in (*label, *self._chosen.beside):
            values = self._label_block(name, batch.column(name))
            if name not in self._values:
                self._values[name] = self._space.share().growing((), values.dtype)
            self._values[name].append(values)
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
        """Returns the kind of each numeric column that did not hold bare numbers."""
        kinds = {}
        for name in numeric:
            reading = None if self._found is None else self._found.readings[name]
            if isinstance(reading, dates.Dates) or (
                reading is None and is_time(schema.field(name).type)
            ):
                kinds[name] = DATE
            elif isinstance(reading, number_formats.Numbers) and reading.sign:
                kinds[name] = reading.sign
        return kinds

    def _begin(self, schema: pa.Schema) -> tuple[str, ...]:
        """Returns the names of the numeric features, as determined by the first block. Raises
        InputError.
        """
        if self._numeric is None:
            features = self._chosen.features
            self._numeric = tuple(
                name for name in features if self._is_numeric(name, schema.field(name).type)
            )
            known = set(self._numeric)
            self._refuse_buckets(self._numeric)
            self._others = tuple(name for name in features if name not in known)
            self._numbers = self._space.growing(len(self._numeric), np.float32)
            self._codes = self._space.growing(len(features) - len(self._numeric), np.int32)
        return self._numeric

    def _is_numeric(self, name: str, kind: pa.DataType) -> bool:
        if name in self._settings.categorical:
            return False
        if self._found is not None:
            return not isinstance(self._found.readings[name], number_formats.Words)
        if name in self._settings.numeric or is_number(kind) or is_time(kind):
            return True
        if is_text(kind):
            return False
        raise checks.unusable(
            self._source,
            f"column {name!r} must hold numbers or text (got {kind}). List it in data.categorical "
            "or data.drop.",
        )

    def _refuse_buckets(self, numeric: Sequence[str]) -> None:
        """Raises InputError if buckets are named for a column that is read as numbers."""
        buckets = self._settings.categorical_buckets
        for name in numeric:
            if isinstance(buckets, dict) and name in buckets:
                raise checks.unusable(
                    self._source,
                    f"column {name!r} is in data.categorical_buckets but holds numbers. List it in "
                    "data.categorical too.",
                )

    def _number_block(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        if self._found is not None:
            return self._read_cells(name, column)
        column = decode(column)
        if is_time(column.type):
            return floats(dates.days(column))
        if is_number(column.type):
            return floats(column)
        if pa.types.is_boolean(column.type):
            return floats(pc.cast(column, pa.int8()))
        if not is_text(column.type):
            raise checks.unusable(
                self._source,
                f"column {name!r} held numbers in training (got {column.type}). Correct the column."
                if self._settings.as_trained
                else f"column {name!r} is in data.numeric but holds {column.type}. Remove it from "
                "data.numeric.",
            )
        settings = self._settings
        reading = number_formats.Numbers(
            number_formats.Style(settings.decimal or ".", settings.thousands or "")
        )
        numbers = reading.read(pc.cast(column, pa.string()))
        return floats(numbers) if numbers is not None else self._no_number(name, column, reading)

    def _read_cells(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        """Reads cells in the format of the first ones; collects other cells, to read the column
        again in another way.
        """
        assert self._found is not None  # noqa: S101 - of a stream of text
        reading = self._found.readings[name]
        assert not isinstance(reading, number_formats.Words)  # noqa: S101 - of a column of numbers
        column = pc.cast(column, pa.string())
        values = reading.read(column)
        if values is not None:
            if self._found.points is not None and isinstance(reading, number_formats.Numbers):
                self._found.points.look(name, column, reading)
            return floats(values)
        if name in self._settings.numeric:
            return self._no_number(name, column, reading)
        if (
            isinstance(reading, dates.Dates)
            and reading.form
            and reading.form == self._settings.date_form(name)
        ):
            raise dates.not_all_dates(self._source, name, reading.form)
        odd_cells = self.odd.setdefault(name, [])
        if isinstance(reading, number_formats.Numbers) and len(odd_cells) < MAX_ODD:
            odd_cells += (
                number_formats.filter_unlike(column, reading)
                .slice(0, MAX_ODD - len(odd_cells))
                .to_pylist()
            )
        return np.full(len(column), np.nan)

    def _no_number(self, name: str, column: pa.Array, reading: Any) -> npt.NDArray[np.float64]:
        where = checks.rows(self._source, self._rows + _first_unread(column, reading) + 1)
        raise checks.unusable(
            self._source,
            f"column {name!r} held numbers in training and holds text in {where}. Correct the "
            "value, or list it in data.na if it stands for an empty cell."
            if self._settings.as_trained
            else f"column {name!r} is in data.numeric and holds text in {where}. Correct the "
            "value, list it in data.na if it stands for an empty cell, or remove the column from "
            "data.numeric.",
        )

    def _text(self, column: pa.Array) -> pa.Array:
        """Returns a column of text cells without marks; other columns unchanged."""
        if self._found is None or not self._found.marked:
            return column
        return texts.plain(pc.cast(column, pa.string()))

    def _codes_of(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        try:
            if name not in self._words:
                self._words[name] = self._vocabulary(name)
            return self._words[name].codes(self._text(column))
        except pa.ArrowException:
            raise checks.unusable(
                self._source,
                f"column {name!r} is read as categories, and its values cannot be written as text "
                f"(got {column.type}). Drop the column.",
            ) from None

    def _vocabulary(self, name: str) -> Vocabulary:
        is_feature = name in self._features
        buckets = self._settings.buckets(name) if is_feature else None
        return Vocabulary(self._source, name, buckets=buckets)

    def _label_block(self, name: str, column: pa.Array) -> npt.NDArray[Any]:
        column = decode(column)
        if self._found is not None and name not in self._settings.categorical:
            reading = self._found.readings[name]
            if isinstance(reading, number_formats.Numbers):
                return self._read_cells(name, column)
        elif self._found is None and is_number(column.type):
            return floats(column)
        if not is_text(column.type):
            role = self._role(name)
            raise checks.unusable(
                self._source,
                f"{role} column {name!r} must hold numbers or text (got {column.type}). Convert "
                "it.",
            )
        return self._codes_of(name, column)

    def labels(self) -> npt.NDArray[Any] | None:
        """Returns the labels of all rows, [N] float64 or text; None without a label column. Raises
        InputError.
        """
        name = self._chosen.label
        return None if name is None else self._values_of(name)

    def _values_of(self, name: str) -> npt.NDArray[Any]:
        """Returns a label or role column of all rows. Raises InputError if a value is missing,
        unless rows without a label are left out.
        """
        values = self._values[name].finish()
        if name in self._words:
            values = self._words[name].all_texts(values)
            missing_N = checks.no_text(values)
        else:
            checks.require_finite(self._source, values[:, None], [name])
            missing_N = np.isnan(values)
        left_out = name == self._settings.label and self._settings.unlabelled == "drop"
        if name not in self.odd and not left_out:
            role = self._role(name)
            checks.require_present(
                self._source,
                f"{role} column {name!r}",
                missing_N,
                f'Leave out the rows without a {role}, or set data.unlabelled to "drop".'
                if name == self._settings.label
                else f"Leave out the rows without a {role}.",
            )
        return values

    def _role(self, name: str) -> str:
        return self._settings.role_beside(name)

    def _split_block(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        column = decode(self._text(column))
        text = (
            pc.cast(column, pa.string())
            if is_text(column.type)
            else pa.nulls(len(column), pa.string())
        )
        codes = (
            pc.index_in(text, value_set=pa.array(SPLITS))
            .fill_null(-1)
            .to_numpy(zero_copy_only=False)
        )
        if (codes < 0).any():
            where = checks.rows(self._source, self._rows + int((codes < 0).argmax()) + 1)
            raise checks.unusable(
                self._source,
                f"column {name!r}, which data.split names, must hold {', '.join(SPLITS)} (got "
                f"something else in {where}). Correct it.",
            )
        result: npt.NDArray[np.int32] = codes
        return result

    def splits(self) -> npt.NDArray[np.object_] | None:
        """Returns the split of each row, [N] text; None without a split column."""
        return (
            np.array(SPLITS, object)[np.concatenate(self._split)]
            if self._chosen.split is not None
            else None
        )


def id_texts(source: str, name: str, column: pa.Array) -> pa.Array:
    """Returns ids as text, whole numbers in decimal digits, null if missing. Raises InputError for
    other types.
    """
    column = decode(column)
    if not (
        pa.types.is_integer(column.type)
        or (is_text(column.type) and not pa.types.is_boolean(column.type))
        # Spark and Oracle store whole numbers as decimals of scale 0.
        or (pa.types.is_decimal(column.type) and column.type.scale == 0)
    ):
        raise checks.unusable(
            source,
            f"id column {name!r} must hold text or whole numbers (got {column.type}). Choose "
            "another column, or convert it.",
        )
    return pc.cast(column, pa.large_string())


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
