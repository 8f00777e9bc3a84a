"""Looks at a party's table with the reader that a run uses, so that what is written down is what a run finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from vfl.new.rules import Counts, Values, left_out_number, left_out_text
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table

Read = Callable[[tuple[str, ...]], Values | None]  # reads columns that are one id together; None: they cannot be one


@dataclass(frozen=True)
class Look:
    """What a table shows.

    rows: with an id, each id once; left_out: of the source's rows, those without an id or with a repeated one.
    numbers, categories: the feature columns. drop: {column: why it is of no use}. missing: whether numbers are missing.
    ids: as the rules spell them. notes: what the table's reader has guessed. labels: how many rows each value has; none
    if no label was read.
    """

    rows: int
    left_out: str
    repeated: int
    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    missing: bool
    ids: Sequence[str] = field(repr=False)
    notes: tuple[str, ...] = ()
    drop: dict[str, str] = field(default_factory=dict)
    labels: Counts = field(default_factory=dict)


def reader(source: str) -> Read:
    """Returns what reads columns of a table, each once."""
    return cache(lambda names: _values(source, names))


def _values(source: str, names: tuple[str, ...]) -> Values | None:
    """Reads columns as an id is read. Returns None if they cannot be one. Raises InputError for an unreadable file."""
    try:
        return read_values(source, names)
    except InputError as error:
        if error.code != Code.DATA_INVALID:
            raise
        return None


def read_values(source: str, names: tuple[str, ...]) -> Values:
    """Reads columns as an id is read. Raises InputError if they cannot be one."""
    settings = DataSettings(source=source, id=names, columns=(), duplicates="first")
    table = load_table(settings, with_label=False)
    return Values(table.counts.rows if table.counts is not None else len(table), table.ids)


def look(
    source: str,
    id_: tuple[str, ...],
    rules: tuple[str, ...],
    values: Callable[[str], Values | None],
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
) -> Look:
    """Reads a table as a run would.

    Args:
        source: the table.
        id_: its id columns.
        rules: the rules for ids of the recipe.
        values: reads a single column, see ``reader``.
        label: the label column of the active party.
        drop: columns that a person leaves out.

    Raises InputError.
    """
    settings = DataSettings(
        source=source, id=id_, id_rules=rules, duplicates="first", label=label, drop=tuple(drop), missing="mean"
    )
    table = load_table(settings, with_label=label is not None)
    useless = dict.fromkeys(drop, "as you say")
    for name in table.categorical_names:
        if left_out_text(values(name)):
            useless[name] = "too many different texts"
    for name in table.numeric_names:
        if left_out_number(name, values):
            useless[name] = "looks like an id"
    return Look(
        rows=len(table),
        left_out=table.counts.left_out if table.counts is not None else "",
        repeated=table.counts.repeated if table.counts is not None else 0,
        numbers=tuple(name for name in table.numeric_names if name not in useless),
        categories=tuple(name for name in table.categorical_names if name not in useless),
        missing=not useless.keys() >= set(table.numeric_names) and _misses_numbers(settings, tuple(useless)),
        ids=table.ids,
        notes=table.notes,
        drop=useless,
        labels=_counts(table),
    )


def _misses_numbers(settings: DataSettings, drop: tuple[str, ...]) -> bool:
    """Whether a run would refuse the table because numbers are missing."""
    strict = settings.model_copy(update={"drop": drop, "missing": "error"})
    try:
        load_table(strict, with_label=settings.label is not None)
    except InputError:  # all else was in order a moment ago
        return True
    return False


def _counts(table: Table) -> Counts:
    return {} if table.labels is None else Counter(table.labels.tolist())
