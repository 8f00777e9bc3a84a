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
from vfl_party.data.passes import KeyPasses
from vfl_party.data.table import Categories, Table

# The separator between party and column. No party's name contains it.
_SEPARATOR = ":"


def read_table(
    settings: DataSettings, with_label: bool, load: Callable[[DataSettings, bool], Table]
) -> Table:
    """Reads a table with ``load``. If the settings have ``parts``, reads each part and joins their
    columns.

    A column of a joined table is called ``party:column``, or keeps its name if only one part has
    columns. The label comes from the first part. Raises InputError if a part has images, or if the
    ids of the parts differ and ``in_common`` is false.
    """
    if not settings.parts:
        return load(settings, with_label)
    first_name, *_ = settings.parts
    tables = {
        name: _prefix_columns(
            settings, name, load(part_settings, with_label and name == first_name)
        )
        for name, part_settings in settings.parts.items()
    }
    if settings.in_common:
        tables = _select_common(tables)
        checks.require_rows(settings.source, len(tables[first_name]))
    first = tables[first_name]
    for name, table in tables.items():
        if table.key_columns is None and table.ids != first.ids:
            raise checks.unusable(
                settings.source,
                f"{name} and {first_name} must have the same ids (got {len(table):,} and "
                f"{len(first):,} rows). Cut each table to the common ids, as for a federation.",
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


def _select_common(tables: dict[str, Table]) -> dict[str, Table]:
    """Returns the rows of each table that all tables have, in the same order."""
    passes = {name: KeyPasses(table, name) for name, table in tables.items()}
    for number in range(next(iter(passes.values())).count):
        parts = {name: one.select(number) for name, one in passes.items()}
        first, *others = parts.values()
        common = Ids.of(first.ids)
        for table in others:
            common = common.take(np.flatnonzero(common.among(table.ids)))
        for name, one in passes.items():
            one.add(parts[name].among(common))
    return {name: table.select(passes[name].matches.rows) for name, table in tables.items()}


def select_part(table: Table, settings: DataSettings, name: str) -> Table:
    """Returns a joined table with the columns of one part. ``settings``: The settings of the joined
    table.
    """
    prefix = _get_prefix(settings, name)
    numeric = [
        column_number
        for column_number, column in enumerate(table.numeric_names)
        if column.startswith(prefix)
    ]
    categorical = [
        column_number
        for column_number, column in enumerate(table.categorical_names)
        if column.startswith(prefix)
    ]
    return replace(
        table,
        numeric_NF=table.numeric_NF[:, numeric]
        if table.numeric_NF is not None and numeric
        else None,
        numeric_names=tuple(table.numeric_names[column_number] for column_number in numeric),
        categorical=table.categorical.select(categorical)
        if table.categorical is not None and categorical
        else None,
        categorical_names=tuple(
            table.categorical_names[column_number] for column_number in categorical
        ),
    )


def own_columns(names: tuple[str, ...], settings: DataSettings, part: str) -> tuple[str, ...]:
    """Returns the column names of one part of a joined table, as in the part's own table.
    ``settings``: The settings of the joined table.
    """
    prefix = _get_prefix(settings, part)
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _get_prefix(settings: DataSettings, part: str) -> str:
    """Returns the prefix of a part's columns: '' if no other part has columns, so that the part's
    own table can replace the joined table.
    """
    parts_with_columns = [
        name for name, part_settings in settings.parts.items() if part_settings.columns != ()
    ]
    return "" if parts_with_columns == [part] else part + _SEPARATOR


def _prefix_columns(settings: DataSettings, part: str, table: Table) -> Table:
    """Returns a part's table with prefixed column names. Images are removed if the part gives only
    ids and labels. ``settings``: The settings of the joined table.
    """
    if settings.parts[part].columns == ():
        return replace(table, images_NCHW=None)
    if table.images_NCHW is not None:
        raise checks.unusable(
            table.source,
            f"{part} has images, but only columns can be joined. Use columns.",
        )
    prefix = _get_prefix(settings, part)
    return replace(
        table,
        numeric_names=tuple(prefix + name for name in table.numeric_names),
        categorical_names=tuple(prefix + name for name in table.categorical_names),
        kinds={prefix + name: kind for name, kind in table.kinds.items()},
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
