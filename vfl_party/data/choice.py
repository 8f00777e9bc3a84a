"""Chooses the columns of a table (ids, label, split, features and other roles), and the part of a
data set that a party's view has: columns, rows, or quarters or halves of images.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import ROW, DataSettings, ViewSettings
from vfl_party.data import checks
from vfl_party.data.checks import unusable

# The column name that pandas writes for an index without a name.
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")


@dataclass(frozen=True)
class ColumnChoice:
    """The names of the columns to read. ``beside``: The columns with other roles, such as
    weights.
    """

    id: tuple[str, ...]
    label: str | None
    features: tuple[str, ...]
    split: str | None = None
    beside: tuple[str, ...] = ()

    def all_names(self) -> list[str]:
        """Returns the names of all columns: ids, label, other roles, split, features."""
        roles = (name for name in (self.label, *self.beside, self.split) if name)
        return [*self.id, *roles, *self.features]


def is_row_number(settings: DataSettings, names: Sequence[str]) -> bool:
    """Returns whether the row number is the id: ``data.id`` is ``row``, and no column has this
    name.
    """
    return settings.id == (ROW,) and ROW not in names


def without_row(settings: DataSettings, names: Sequence[str]) -> DataSettings:
    """Returns the settings without an id if it is the row number, for sources that number their
    rows themselves.
    """
    return settings.model_copy(update={"id": ()}) if is_row_number(settings, names) else settings


def reads_split(settings: DataSettings, with_label: bool) -> bool:
    """Returns whether to read the column of splits. A passive party with the active party's
    settings does not read it.
    """
    return settings.split is not None and (with_label or settings.label is None)


def choose(source: str, names: list[str], settings: DataSettings, with_label: bool) -> ColumnChoice:
    """Chooses id, label and feature columns, in the order of ``data.columns`` or of the table.

    Raises InputError.
    """
    if not settings.id:
        raise checks.unusable(
            source, f"needs data.id. Name its id column, one of {checks.list_names(names)}."
        )
    if with_label and settings.label is None:
        raise checks.unusable(
            source, f"needs data.label. Name its label column, one of {checks.list_names(names)}."
        )
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise checks.unusable(source, f"has two columns called {repeated[0]!r}. Rename one.")
    checks.require_names(source, "id", settings.id, names)
    if with_label:
        checks.require_roles(source, settings, names)
    elif reads_split(settings, with_label):
        checks.require_names(source, "split", [settings.split or ""], names)
    features = choose_features(source, names, settings, leave_out=(*settings.id, *settings.roles))
    label, split = (
        settings.label if with_label else None,
        settings.split if reads_split(settings, with_label) else None,
    )
    return ColumnChoice(settings.id, label, features, split, settings.beside if with_label else ())


def choose_features(
    source: str,
    names: Sequence[str],
    settings: DataSettings,
    *,
    leave_out: tuple[str | None, ...] = (),
) -> tuple[str, ...]:
    """Chooses the party's feature columns: the columns that ``data.columns`` lists, or all columns,
    without ``leave_out`` and ``data.drop``, and only those of the party's view.

    An unnamed pandas index is a feature only if it is listed. Raises InputError.
    """
    missing_column = next((name for name in settings.columns or () if name not in names), None)
    if settings.as_trained and missing_column is not None:
        raise checks.unusable(
            source,
            f"has no column {missing_column!r}, but training had "
            f"it{checks.suggest_names(missing_column, names)}. Add the column.",
        )
    for key in ("columns", "drop", "numeric", "categorical"):
        checks.require_names(source, key, getattr(settings, key) or (), names)
    buckets = settings.categorical_buckets
    if isinstance(buckets, dict) and not settings.as_trained:
        checks.require_names(source, "categorical_buckets", [*buckets], names)
    contradictory = sorted(set(settings.numeric) & set(settings.categorical))
    if contradictory:
        raise checks.unusable(
            source,
            f"column {contradictory[0]!r} is in both data.numeric and data.categorical. Remove it "
            "from one of them.",
        )
    left_out = {*leave_out, *settings.drop, *_find_pandas_index(names, settings)}
    wanted = names if settings.columns is None else dict.fromkeys(settings.columns)
    features = tuple(name for name in wanted if name not in left_out)
    return features[column_run(source, len(features), settings.view)]


def describe_index(names: Sequence[str], settings: DataSettings) -> tuple[str, ...]:
    """Returns a note for people about a pandas index that no setting names; () if there is none."""
    left_out = _find_pandas_index(names, settings)
    if not left_out:
        return ()
    return (
        f"{checks.list_names(left_out)}: the index of a pandas table is not read. If it is a "
        "feature, list it in data.numeric or data.categorical.",
    )


def _find_pandas_index(names: Sequence[str], settings: DataSettings) -> list[str]:
    named_columns = {*settings.id, *settings.roles, *settings.numeric, *settings.categorical}
    named_columns |= {*(settings.columns or ()), *settings.drop}
    return [name for name in names if _PANDAS_INDEX.fullmatch(name) and name not in named_columns]


# The view schemes for images.
CUTS = ("quadrants", "halves")


def _get_slice(n: int, part: int, parts: int) -> slice:
    """Divides ``range(n)`` into ``parts`` contiguous slices of nearly the same length, the longer
    ones first. Returns the slice number ``part``.
    """
    size, longer = divmod(n, parts)
    start = part * size + min(part, longer)
    return slice(start, start + size + (part < longer))


def column_run(source: str, n: int, view: ViewSettings | None) -> slice:
    """Returns the party's slice of ``n`` columns; all columns unless the scheme is ``columns``.
    Raises InputError if there are too few columns.
    """
    if view is None or view.scheme != "columns":
        return slice(0, n)
    if n < view.parts:
        raise unusable(
            source,
            f"data.view needs at least {view.parts} feature columns, one a part (got {n}). Use "
            "fewer parts.",
        )
    return _get_slice(n, view.part, view.parts)


def row_run(order: npt.NDArray[np.int64], view: ViewSettings | None) -> npt.NDArray[np.int64]:
    """Returns the party's rows, int64, in the same order; all rows unless the scheme is
    ``rows``.
    """
    return order[view.part :: view.parts] if view is not None and view.scheme == "rows" else order


def cut_images(
    source: str, images_NCHW: npt.NDArray[Any], view: ViewSettings | None
) -> npt.NDArray[Any]:
    """Returns the party's quarter or half of each image [N, C, H, W]. If a side is odd, its first
    half is longer.

    Raises InputError if a side is a single pixel.
    """
    if view is None or view.scheme not in CUTS:
        return images_NCHW
    height, width = images_NCHW.shape[2:]
    if width < 2 or (view.scheme == "quadrants" and height < 2):
        raise unusable(
            source,
            f"images of {height} x {width} pixels cannot be divided into {view.scheme}. Use larger "
            "images, or another data.view.",
        )
    columns = _get_slice(width, view.part % 2, 2)
    rows = _get_slice(height, view.part // 2, 2) if view.scheme == "quadrants" else slice(0, height)
    return images_NCHW[:, :, rows, columns]
