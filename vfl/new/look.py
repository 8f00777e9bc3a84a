"""Looks at a party's table with the reader that a run uses, so that what is written down is what a run finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vfl.new.rules import Counts, Values, left_out_number, left_out_text
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table, read_rows, tabulate
from vfl_party.data.smells import smells

Read = Callable[[tuple[str, ...]], Values | None]  # reads columns that are one id together; None: they cannot be one


@dataclass(frozen=True)
class Look:
    """What a table shows.

    rows: with an id, each id once; left_out: of the source's rows, those without an id or with a repeated one.
    numbers, categories: the feature columns. drop: {column: why it is of no use}. missing: whether numbers are missing.
    ids: as the rules spell them. notes: what the table's reader has guessed. odd: what looks wrong. labels: how many
    rows each value has; none if no label was read.
    """

    rows: int
    left_out: str
    repeated: int
    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    missing: bool
    ids: Sequence[str] = field(repr=False)
    notes: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    drop: dict[str, str] = field(default_factory=dict)
    labels: Counts = field(default_factory=dict)


def reader(table: DataSettings) -> Read:
    """Returns what reads columns of a table, each once."""
    return cache(lambda names: _values(table, names))


def _values(table: DataSettings, names: tuple[str, ...]) -> Values | None:
    """Reads columns as an id is read. Returns None if they cannot be one. Raises InputError for an unreadable file."""
    try:
        return read_values(table, names)
    except InputError as error:
        if error.code != Code.DATA_INVALID:
            raise
        return None


def read_values(table: DataSettings, names: tuple[str, ...]) -> Values:
    """Reads columns as an id is read. Raises InputError if they cannot be one."""
    alone: dict[str, Any] = {"id": names, "columns": (), "numeric": (), "categorical": (), "duplicates": "first"}
    found = load_table(table.model_copy(update=alone), with_label=False)
    return Values(found.counts.rows if found.counts is not None else len(found), found.ids)


def look(
    source: DataSettings,
    id_: tuple[str, ...],
    rules: tuple[str, ...],
    values: Callable[[str], Values | None],
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
) -> Look:
    """Reads a table as a run would.

    Args:
        source: the table, and how it is read.
        id_: its id columns.
        rules: the rules for ids of the recipe.
        values: reads a single column, see ``reader``.
        label: the label column of the active party.
        drop: columns that a person leaves out.

    Raises InputError.
    """
    chosen: dict[str, Any] = {"id": id_, "id_rules": rules, "label": label, "drop": tuple(drop)}
    settings = source.model_copy(update=chosen | {"duplicates": "first", "missing": "mean"})
    rows = read_rows(settings, label is not None)
    found = list(smells(rows, settings))
    table = tabulate(rows, settings, label is not None)
    mostly = {smell.column: smell.mostly for smell in found if smell.mostly}
    useless, said = dict.fromkeys(drop, "as you say"), {*settings.categorical, *settings.numeric}
    for name in table.categorical_names:
        if name not in said and left_out_text(values(name)):
            kind = mostly.get(name)
            useless[name] = f"most cells are {kind}, but some are not read" if kind else "too many different texts"
    for name in table.numeric_names:
        if name not in said and left_out_number(name, values):
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
        odd=tuple(smell.text for smell in found if smell.mostly or smell.column not in useless),
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
