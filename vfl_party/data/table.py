"""Defines the result of reading a table, before and after its rows are checked: ids, labels and
features of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import KeyColumns
from vfl_common.text import shorten
from vfl_party.data import checks
from vfl_party.data.checks import list_names
from vfl_party.data.ids import IdCounts, Ids
from vfl_party.data.pixels import Pixels, is_whole, to_unit
from vfl_party.data.row_arrays import IN_MEMORY, Space, parts, parts_of, release, some_rows

MAX_CLASSES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Categories:
    """The cells of categorical columns.

    codes_NK: The position of each cell in its column's ``words``, int32 [N, K], -1 if missing.
    words: The categories of each column, not sorted.
    """

    codes_NK: npt.NDArray[np.int32]  # noqa: N815 - the shape is part of the name
    words: tuple[tuple[str, ...], ...]

    def texts(self) -> npt.NDArray[np.object_]:
        """Returns the cells as text, [N, K], None if missing."""
        texts = np.empty(self.codes_NK.shape, object)
        for k, words in enumerate(self.words):
            texts[:, k] = np.array([*words, None], object)[self.codes_NK[:, k]]
        return texts

    def select(self, columns: Sequence[int]) -> Categories:
        """Returns the given columns."""
        return Categories(self.codes_NK[:, list(columns)], tuple(self.words[k] for k in columns))


# The reasons why a row of the source is not in the table; '' if it is there.
LEFT_OUT = ("", "without an id", "with a repeated id", "without a label")


@dataclass(frozen=True, eq=False)
class InputRows:
    """All rows of a source, in the order of the source, to write results for the same rows.

    Args:
        ids: The id columns as in the source, [S] each.
        left_out: For each row, its position in ``LEFT_OUT``, uint8 [S].
        separator: The separator between the cells of a text file; None for other sources.
        decimal: The decimal separator of a text file; None for other sources.
    """

    ids: tuple[pa.Array | pa.ChunkedArray, ...]
    left_out: npt.NDArray[np.uint8]
    separator: str | None = None
    decimal: str | None = None

    def __len__(self) -> int:
        return len(self.left_out)

    def only(self, rows: npt.NDArray[np.int64]) -> InputRows:
        """Returns only the given rows."""
        return replace(
            self,
            ids=tuple(column.take(pa.array(rows)) for column in self.ids),
            left_out=self.left_out[rows],
        )


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a party in canonical order, that is, sorted by the UTF-8 bytes of their ids. All
    arrays are in this order.

    Args:
        source: The name of the table, for errors.
        ids: The ids of the rows.
        numeric_NF: The numeric columns, float32 [N, F], NaN if missing.
        images_NCHW: The pixels as in the source: uint8, uint16 or float32.
        labels: The labels, [N] float64 or text (object); None if they were not read.
        splits: The split of each row, [N] text; None without a split column.
        counts: The number of rows in the source, and of rows that are left out.
        notes: Notes for people about formats that were guessed.
        space: The space of the arrays.
        kinds: See ``columns.Columns``.
        style: See ``columns.Columns``.
        own: The rows of the source, if the settings keep them.
        places_N: The position of each row in ``own``, int64 [N].
        beside: See ``columns.Rows``.
        group: The name of the column that ``data.group`` names.
        key_columns: The columns of the recipe's keys, which are in the ids; None without keys.
        key_N: The number of the key that matched each aligned row, from 0, uint8 [N]; None without
            keys, and before the alignment.
        pairs_N2: The similarity and the probability of the link of each aligned row, float32
            [N, 2]; None without a fuzzy linkage.

    A table has columns or images; an active party without features has neither.
    """

    source: str
    ids: Sequence[str]
    numeric_NF: npt.NDArray[np.float32] | None = None  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...] = ()
    categorical: Categories | None = None
    categorical_names: tuple[str, ...] = ()
    images_NCHW: Pixels | None = None  # noqa: N815
    labels: npt.NDArray[Any] | None = None
    splits: npt.NDArray[np.object_] | None = None
    counts: IdCounts | None = None
    notes: tuple[str, ...] = ()
    space: Space = IN_MEMORY
    kinds: Mapping[str, str] = field(default_factory=dict)
    style: tuple[str, str] | None = None
    own: InputRows | None = None
    places_N: npt.NDArray[np.int64] | None = None  # noqa: N815
    beside: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    group: str | None = None
    key_columns: KeyColumns | None = None
    key_N: npt.NDArray[np.uint8] | None = None  # noqa: N815
    pairs_N2: npt.NDArray[np.float32] | None = None  # noqa: N815

    @property
    def groups(self) -> npt.NDArray[Any] | None:
        """The group of each row, [N] float64 or text; None if no group column was read."""
        return None if self.group is None else self.beside.get(self.group)

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: npt.NDArray[np.int64], ids: Ids | None = None) -> Table:
        """Returns the rows at the given positions, int64 [B], in the given order. ``ids``: The ids
        of these rows, if they are known.
        """

        def take_rows(
            values: npt.NDArray[Any] | None, space: Space = self.space
        ) -> npt.NDArray[Any] | None:
            return None if values is None else space.take(values, rows)

        share = self.space.share()
        words = self.categorical
        return replace(
            self,
            ids=Ids.of(self.ids).take(rows) if ids is None else ids,
            numeric_NF=take_rows(self.numeric_NF),
            categorical=None
            if words is None
            else replace(words, codes_NK=self.space.take(words.codes_NK, rows)),
            images_NCHW=take_rows(self.images_NCHW),
            labels=take_rows(self.labels, share),
            splits=take_rows(self.splits, share),
            places_N=take_rows(self.places_N, share),
            key_N=take_rows(self.key_N, share),
            pairs_N2=take_rows(self.pairs_N2, share),
            beside={name: self.space.take(values, rows) for name, values in self.beside.items()},
        )

    def pixels(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Returns the images of the given rows, or of all rows, float32 [B, C, H, W]. Integers are
        scaled to 0..1.

        Raises InputError if the table has no images.
        """
        if self.images_NCHW is None:
            raise checks.unusable(
                self.source, "holds columns and no images. Give a source of images."
            )
        return to_unit(some_rows(self.images_NCHW, slice(None) if rows is None else rows))

    def among(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns whether the id of each row is in ``ids``, bool [N]."""
        return Ids.of(self.ids).among(ids)


def describe(table: Table) -> list[str]:
    """Returns lines of text that describe a table: the numbers of rows and columns, the column
    names, and the labels.

    The lines show no id and no feature value.
    """
    lines = [f"rows: {len(table)}"]
    if table.images_NCHW is not None:
        channels, height, width = table.images_NCHW.shape[1:]
        lines.append(f"images: {channels} x {height} x {width} (channels x height x width)")
        lines += _describe_missing(("pixels",), [_count_missing_pixels(table.images_NCHW)])
    if table.numeric_NF is not None:
        lines.append(
            f"numeric columns: {len(table.numeric_names)} ({list_names(table.numeric_names)})"
        )
        lines += _describe_missing(
            table.numeric_names, checks.count_cells(table.numeric_NF, np.isnan).counts.tolist()
        )
    if table.categorical is not None:
        lines.append(f"categorical columns: {len(table.categorical_names)}")
        counts_by_column = [
            count_words(table.categorical, k) for k in range(len(table.categorical_names))
        ]
        for name, counts in zip(table.categorical_names, counts_by_column, strict=True):
            lines.append(f"  {shorten(name)!r}: {np.count_nonzero(counts[:-1])} categories")
        lines += _describe_missing(
            table.categorical_names, [int(counts[-1]) for counts in counts_by_column]
        )
    if len(lines) == 1:
        lines.append("features: none")
    if table.labels is not None:
        lines += _describe_labels(table.labels)
    return lines


def count_words(
    categories: Categories, k: int, rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Counts the cells of column ``k`` for each of its words, followed by the number of missing
    cells, int64 [words + 1].

    ``rows``: The rows to count, int64; None for all rows.
    """
    codes_NK, size = categories.codes_NK, len(categories.words[k])
    counts = np.zeros(size + 1, np.int64)
    for part in parts(len(codes_NK) if rows is None else len(rows)):
        counts += np.bincount(
            codes_NK[part if rows is None else rows[part], k] % (size + 1), minlength=size + 1
        )
        release(codes_NK)
    return counts


def _count_missing_pixels(images_NCHW: Pixels) -> int:
    if is_whole(images_NCHW):
        return 0
    return sum(int(np.isnan(images_NCHW[part]).sum()) for part in parts_of(images_NCHW))


def _describe_missing(names: tuple[str, ...], counts: list[int]) -> list[str]:
    return [
        f"  {shorten(name)!r}: {count} missing"
        for name, count in zip(names, counts, strict=True)
        if count
    ]


def _describe_labels(labels: npt.NDArray[Any]) -> list[str]:
    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MAX_CLASSES_SHOWN:
        if labels.dtype == object:
            return [f"labels: text, {len(values)} different values"]
        return [
            f"labels: numbers, {len(values)} different values from {labels.min():g} to "
            f"{labels.max():g},"
            f" mean {labels.mean():g}, standard deviation {labels.std():g}"
        ]
    lines = [
        f"{shorten(value) if isinstance(value, str) else f'{value:g}'}: {n}"
        for value, n in zip(values, counts, strict=True)
    ]
    return [f"labels: {len(values)} different values", *(f"  {line}" for line in lines)]


@dataclass(frozen=True, eq=False)
class Columns:
    """Feature columns by type.

    Args:
        numeric_NF: The numeric columns, float32 [N, F], NaN if missing.
        categorical: The categories of the other columns.
        kinds: For each numeric column of dates or numbers with a sign, ``date`` or the sign.
        style: The decimal and thousands separators of cells that were text; else None.
    """

    numeric_NF: npt.NDArray[np.float32]  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...]
    categorical: Categories
    categorical_names: tuple[str, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    style: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a table, in the order of the source.

    Args:
        ids: The id columns as read, each [N] text, None if missing.
        labels: The labels, [N] float64 or text (object); None without labels.
        features: The feature columns, or pixels [N, C, H, W], or values [N, F] that ``image_shape``
            arranges as images.
        splits: The split of each row, [N] text; None without a split column.
        notes: Notes for people about formats that were guessed.
        id_types: The types of the id columns, if the source declares them.
        separator: See ``RowStream``.
        beside: For each column with another role, its values, in the types of labels.
        numbered: Whether the row number is the id.
        unsorted: See ``RowStream``.
    """

    ids: Sequence[Any]
    labels: npt.NDArray[Any] | None
    features: Columns | npt.NDArray[Any]
    splits: npt.NDArray[np.object_] | None = None
    notes: tuple[str, ...] = ()
    id_types: tuple[pa.DataType, ...] = ()
    separator: str | None = None
    beside: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    numbered: bool = False
    unsorted: str = ""

    def __len__(self) -> int:
        return len(self.ids[0])

    def own_ids(self) -> tuple[pa.Array | pa.ChunkedArray, ...]:
        """Returns the id columns with the types of the source, such as integers."""
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
