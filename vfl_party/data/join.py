"""Joins the tables of several parties by id, for a centralized baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.ids import Ids
from vfl_party.data.table import Categories, Table

# Separator of party and column: no party's name contains it.
_BETWEEN = ":"


def read_table(
    settings: DataSettings, with_label: bool, load: Callable[[DataSettings, bool], Table]
) -> Table:
    """Reads a table with ``load``; with ``parts`` in the settings, reads each of them and joins
    their columns.

    A column is then called ``party:column``, or as in its own table if only one part gives columns;
    the label is that of the first part. Raises InputError, also if the parts have images, or have
    other ids than the first without ``in_common``.
    """
    if not settings.parts:
        return load(settings, with_label)
    one, *_ = settings.parts
    tables = {
        name: _prefix_columns(settings, name, load(own, with_label and name == one))
        for name, own in settings.parts.items()
    }
    if settings.in_common:
        common = tables[one].ids
        for table in tables.values():
            common = Ids.of(common).take(np.flatnonzero(Ids.of(common).among(table.ids)))
        tables = {
            name: table.select(np.flatnonzero(table.among(common)))
            for name, table in tables.items()
        }
        checks.require_rows(settings.source, len(common))
    first = tables[one]
    for name, table in tables.items():
        if table.ids != first.ids:
            raise checks.unusable(
                settings.source,
                f"{name} and {one} must have the same ids (got {len(table):,} and {len(first):,} "
                "rows). Cut each table to the ids in common, as for a federation.",
            )
    return replace(
        first,
        source=settings.source,
        numeric_NF=_concat_arrays([table.numeric_NF for table in tables.values()]),
        numeric_names=tuple(name for table in tables.values() for name in table.numeric_names),
        categorical=_concat_categories([table.categorical for table in tables.values()]),
        categorical_names=tuple(
            name for table in tables.values() for name in table.categorical_names
        ),
        kinds={name: kind for table in tables.values() for name, kind in table.kinds.items()},
    )


def part_of(table: Table, settings: DataSettings, name: str) -> Table:
    """Returns the columns of a joined table that belong to one part. ``settings``: of all parts."""
    start = _start(settings, name)
    numeric = [at for at, column in enumerate(table.numeric_names) if column.startswith(start)]
    categorical = [
        at for at, column in enumerate(table.categorical_names) if column.startswith(start)
    ]
    return replace(
        table,
        numeric_NF=table.numeric_NF[:, numeric]
        if table.numeric_NF is not None and numeric
        else None,
        numeric_names=tuple(table.numeric_names[at] for at in numeric),
        categorical=table.categorical.select(categorical)
        if table.categorical is not None and categorical
        else None,
        categorical_names=tuple(table.categorical_names[at] for at in categorical),
    )


def own_columns(names: tuple[str, ...], settings: DataSettings, part: str) -> tuple[str, ...]:
    """Returns one part's columns of a joined table, named as in its own table. ``settings``: of all
    parts.
    """
    start = _start(settings, part)
    return tuple(name.removeprefix(start) for name in names if name.startswith(start))


def _start(settings: DataSettings, part: str) -> str:
    """Returns the prefix of a part's columns: '' if no other part gives columns, so that its own
    table can replace the joined one.
    """
    giving = [name for name, own in settings.parts.items() if own.columns != ()]
    return "" if giving == [part] else part + _BETWEEN


def _prefix_columns(settings: DataSettings, part: str, table: Table) -> Table:
    """Returns a part's table with prefixed column names; without images if it gives only ids and
    labels. ``settings``: of all parts.
    """
    if settings.parts[part].columns == ():
        return replace(table, images_NCHW=None)
    if table.images_NCHW is not None:
        raise checks.unusable(
            table.source,
            f"{part} has images, but only columns can be joined with other parties'. Use columns.",
        )
    start = _start(settings, part)
    return replace(
        table,
        numeric_names=tuple(start + name for name in table.numeric_names),
        categorical_names=tuple(start + name for name in table.categorical_names),
        kinds={start + name: kind for name, kind in table.kinds.items()},
    )


def _concat_arrays(arrays: list[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present, axis=1) if present else None


def _concat_categories(categories: list[Categories | None]) -> Categories | None:
    present = [part for part in categories if part is not None]
    if not present:
        return None
    codes_NK = np.concatenate([part.codes_NK for part in present], axis=1)
    return Categories(codes_NK, tuple(words for part in present for words in part.words))
