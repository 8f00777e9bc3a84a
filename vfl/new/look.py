"""Reads a party's table with the reader of a run, so that the written settings fit a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl.new.rules import MAX_NUMBERED, Counts, Values, is_id_number, is_useless_text
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, first_rows, load_table, read_rows, tabulate
from vfl_party.data.checks import count_cells
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.notes.smells import find_smells
from vfl_party.data.notes.target_leakage import find_target_leakage
from vfl_party.data.table import count_words

# The number of rows in which values are counted before a column is named.
SAMPLE = 10_000
# Reads columns that are one id together; returns None if they cannot be one.
Read = Callable[[tuple[str, ...]], Values | None]


@dataclass(frozen=True)
class Look:
    """The contents of a table.

    rows: the number of rows with an id and a label, each id once; all_rows: of the source;
    left_out: a text about rows without an id, with a repeated one, or without a label. numbers,
    categories: the feature columns. drop: {column: why it is left out}. missing, blank: the columns
    in which numbers, and categories, are missing. ids: as the rules spell them. notes: the reader's
    guesses. odd: possible mistakes. label_leaks: sentences about columns that reveal the label, if
    it has classes. labels: the number of rows of each value; none if no label was read.
    """

    rows: int
    all_rows: int
    left_out: str
    repeated: int
    unlabelled: int
    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    missing: tuple[str, ...]
    blank: tuple[str, ...]
    ids: Sequence[str] = field(repr=False)
    notes: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    label_leaks: tuple[str, ...] = ()
    drop: dict[str, str] = field(default_factory=dict)
    labels: Counts = field(default_factory=dict)


def reader(table: DataSettings) -> Read:
    """Returns a function that reads columns of a table, with a cache."""
    return cache(lambda names: _values(table, names))


def _values(table: DataSettings, names: tuple[str, ...]) -> Values | None:
    """Reads columns as an id is read. Returns None if they cannot be one. Raises InputError for an
    unreadable file.
    """
    try:
        return read_values(table, names)
    except InputError as error:
        if error.code != Code.DATA_INVALID:
            raise
        return None


def read_values(table: DataSettings, names: tuple[str, ...]) -> Values:
    """Reads columns as an id is read. Raises InputError if they cannot be one."""
    alone: dict[str, Any] = {
        "id": names,
        "columns": (),
        "numeric": (),
        "categorical": (),
        "duplicates": "first",
    }
    rows = load_table(table.model_copy(update=alone), with_label=False)
    return Values(rows.counts.rows if rows.counts is not None else len(rows), rows.ids)


def few_valued(table: DataSettings, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns with two to twenty different values in the first rows; none if these
    cannot be read.
    """
    few: list[str] = []
    with contextlib.suppress(InputError, pa.ArrowNotImplementedError):
        for name, column in first_rows(table, names, SAMPLE).items():
            values = pc.unique(pc.drop_null(column))
            if 2 <= len(values) <= MAX_NUMBERED:
                few.append(name)
    return tuple(few)


def look(
    source: DataSettings,
    id_: tuple[str, ...],
    rules: tuple[str, ...],
    values: Callable[[str], Values | None],
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
    max_categories: int | None = None,
) -> Look:
    """Reads a table as a run would.

    Args:
        source: the table, and how it is read.
        id_: its id columns.
        rules: the rules for ids of the recipe.
        values: reads a single column, see ``reader``.
        label: the label column of the active party.
        drop: columns to leave out.
        max_categories: the most categories of a column that the method accepts, including that of
            missing cells; None for any number.

    Raises InputError.
    """
    chosen: dict[str, Any] = {"id": id_, "id_rules": rules, "label": label, "drop": tuple(drop)}
    lenient = {"duplicates": "first", "missing": "mean", "unlabelled": "drop"}
    settings = source.model_copy(update=chosen | lenient)
    rows = read_rows(settings, label is not None)
    odd = list(find_smells(rows, settings))
    table = tabulate(rows, settings, label is not None)
    mostly = {smell.column: smell.mostly for smell in odd if smell.mostly}
    useless, chosen_by_user = (
        dict.fromkeys(drop, "as you say"),
        {*settings.categorical, *settings.numeric},
    )
    for name in table.categorical_names:
        if name not in chosen_by_user and is_useless_text(values(name)):
            kind = mostly.get(name)
            useless[name] = (
                f"most cells are {kind}, but some cannot be read"
                if kind
                else "too many different texts"
            )
    counts = _category_counts(table)
    for name, cells in counts.items():
        if (
            max_categories is not None
            and np.count_nonzero(cells) > max_categories
            and name not in {*chosen_by_user, *useless}
        ):
            useless[name] = f"more than {max_categories} different texts, the maximum for trees"
    for name in table.numeric_names:
        if name not in chosen_by_user and is_id_number(name, values):
            useless[name] = "looks like an id"
    useless |= dict.fromkeys(
        (name for name in _missing(rows, all_rows=True) if name not in chosen_by_user),
        "empty in all rows",
    )
    return Look(
        rows=len(table),
        all_rows=len(rows),
        left_out=table.counts.left_out if table.counts is not None else "",
        repeated=table.counts.repeated if table.counts is not None else 0,
        unlabelled=table.counts.unlabelled if table.counts is not None else 0,
        numbers=tuple(name for name in table.numeric_names if name not in useless),
        categories=tuple(name for name in table.categorical_names if name not in useless),
        missing=tuple(name for name in _missing(rows) if name not in useless),
        blank=tuple(name for name, cells in counts.items() if cells[-1] and name not in useless),
        ids=table.ids,
        notes=table.notes,
        odd=tuple(smell.text for smell in odd if smell.mostly or smell.column not in useless),
        label_leaks=tuple(
            leak.text
            for leak in find_target_leakage(rows, label or "")
            if leak.column not in useless
        ),
        drop=useless,
        labels=_counts(table),
    )


def _missing(rows: Rows, *, all_rows: bool = False) -> tuple[str, ...]:
    """Returns the columns with missing numbers, in all rows, with an id or not.

    ``all_rows``: only those without any number.
    """
    if not isinstance(rows.features, Columns):
        return ()
    cells, names = count_cells(rows.features.numeric_NF, np.isnan), rows.features.numeric_names
    return tuple(names[k] for k in cells.columns if not all_rows or cells.counts[k] == len(rows))


def _category_counts(table: Table) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the number of cells of each word, and then of missing cells, for each column of
    categories.
    """
    words = table.categorical
    return (
        {}
        if words is None
        else {name: count_words(words, k) for k, name in enumerate(table.categorical_names)}
    )


def _counts(table: Table) -> Counts:
    return {} if table.labels is None else Counter(table.labels.tolist())
