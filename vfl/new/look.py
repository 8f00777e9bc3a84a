"""Reads a party's table in the same way as a run does, so that the new files are valid for a
run.
"""

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
from vfl_party.data.notes import find_smells, find_target_leakage
from vfl_party.data.table import Columns, Rows, count_words

# The number of first rows in which different values are counted to propose a label.
SAMPLE = 10_000
# A function that reads the columns of an id; returns None if the columns cannot be an id.
Read = Callable[[tuple[str, ...]], Values | None]


@dataclass(frozen=True)
class Look:
    """The contents of a table.

    rows: the number of rows with a label and a unique id. all_rows: the number of rows in the
    source. left_out: a text about the rows that are left out. repeated, unlabelled: the number of
    rows with a repeated id, and without a label. numbers, categories: the names of the feature
    columns. drop: {column: the reason why it is left out}. missing: the numeric columns with
    missing cells. blank: the categorical columns with missing cells. ids: the ids after the id
    rules. notes: the guesses of the table reader. odd: texts about possible mistakes. label_leaks:
    texts about columns that reveal the label, if it has classes. labels: {value of the label:
    number of rows}; empty if no label was read.
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


def make_reader(table: DataSettings) -> Read:
    """Returns a function that reads columns of a table, with a cache."""
    return cache(lambda names: _values(table, names))


def _values(table: DataSettings, names: tuple[str, ...]) -> Values | None:
    """Reads columns as an id. Returns None if they cannot be an id. Raises InputError for an
    unreadable file.
    """
    try:
        return read_values(table, names)
    except InputError as error:
        if error.code != Code.DATA_INVALID:
            raise
        return None


def read_values(table: DataSettings, names: tuple[str, ...]) -> Values:
    """Reads columns as an id. Raises InputError if they cannot be an id."""
    id_settings: dict[str, Any] = {
        "id": names,
        "columns": (),
        "numeric": (),
        "categorical": (),
        "duplicates": "first",
    }
    rows = load_table(table.model_copy(update=id_settings), with_label=False)
    return Values(rows.counts.rows if rows.counts is not None else len(rows), rows.ids)


def find_label_candidates(table: DataSettings, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns with two to twenty different values in the first rows; empty if the rows
    cannot be read.
    """
    columns: list[str] = []
    with contextlib.suppress(InputError, pa.ArrowNotImplementedError):
        for name, column in first_rows(table, names, SAMPLE).items():
            values = pc.unique(pc.drop_null(column))
            if 2 <= len(values) <= MAX_NUMBERED:
                columns.append(name)
    return tuple(columns)


def inspect_table(
    source: DataSettings,
    id_: tuple[str, ...],
    rules: tuple[str, ...],
    values: Callable[[str], Values | None],
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
    max_categories: int | None = None,
) -> Look:
    """Reads a table as a run does, and returns its contents.

    Args:
        source: the data settings of the table.
        id_: the id columns.
        rules: the recipe's rules for ids.
        values: a function that reads a single column; see ``make_reader``.
        label: the label column, for the active party.
        drop: the columns to leave out.
        max_categories: the maximum number of categories of a column, including missing cells; None
            for no maximum.

    Raises InputError.
    """
    columns: dict[str, Any] = {"id": id_, "id_rules": rules, "label": label, "drop": tuple(drop)}
    lenient = {"duplicates": "first", "missing": "mean", "unlabelled": "drop"}
    settings = source.model_copy(update=columns | lenient)
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
    counts = _count_categories(table)
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
        (name for name in _find_missing(rows, all_rows=True) if name not in chosen_by_user),
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
        missing=tuple(name for name in _find_missing(rows) if name not in useless),
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
        labels=_count_labels(table),
    )


def _find_missing(rows: Rows, *, all_rows: bool = False) -> tuple[str, ...]:
    """Returns the numeric columns with missing cells, in all rows of the source.

    ``all_rows``: whether to return only columns in which all cells are missing.
    """
    if not isinstance(rows.features, Columns):
        return ()
    cells, names = count_cells(rows.features.numeric_NF, np.isnan), rows.features.numeric_names
    return tuple(names[k] for k in cells.columns if not all_rows or cells.counts[k] == len(rows))


def _count_categories(table: Table) -> dict[str, npt.NDArray[np.int64]]:
    """Returns {categorical column: the number of cells of each category, and last of missing
    cells}.
    """
    words = table.categorical
    return (
        {}
        if words is None
        else {name: count_words(words, k) for k, name in enumerate(table.categorical_names)}
    )


def _count_labels(table: Table) -> Counts:
    return {} if table.labels is None else Counter(table.labels.tolist())
