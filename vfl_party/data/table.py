"""A party's rows in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_party.data.checks import listed, no_text
from vfl_party.data.ids import IdCounts

MOST_CLASSES_SHOWN = 20


@dataclass(frozen=True, eq=False)
class Table:
    """Rows in canonical order: sorted by the UTF-8 bytes of their ids; all arrays in that order.

    numeric_NF: NaN if a value is missing; categorical: [N, K] text, None if missing; images_NCHW: pixels, 0 to 1 if
    the source holds bytes; labels: [N] float64 numbers or text (dtype object), None if none were read; splits: [N]
    text, ``train``, ``validation`` or ``test``, if the source says it; counts: of the source's rows, also of those that
    are left out because of their ids. A table has columns or images; an active party without features has neither.
    """

    source: str
    ids: tuple[str, ...]
    numeric_NF: npt.NDArray[np.float32] | None = None  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...] = ()
    categorical: npt.NDArray[np.object_] | None = None
    categorical_names: tuple[str, ...] = ()
    images_NCHW: npt.NDArray[np.float32] | None = None  # noqa: N815
    labels: npt.NDArray[Any] | None = None
    splits: npt.NDArray[np.object_] | None = None
    counts: IdCounts | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: npt.NDArray[np.int64]) -> Table:
        """Returns the rows at the given positions, in the given order."""

        def pick(values: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            return None if values is None else values[rows]

        return replace(
            self,
            ids=tuple(self.ids[row] for row in rows.tolist()),
            numeric_NF=pick(self.numeric_NF),
            categorical=pick(self.categorical),
            images_NCHW=pick(self.images_NCHW),
            labels=pick(self.labels),
            splits=pick(self.splits),
        )


def describe(table: Table) -> list[str]:
    """Returns lines for a person who checks a data set: counts and names of columns, labels with their counts.

    They hold no id and no feature value.
    """
    lines = [f"rows: {len(table)}"]
    if table.images_NCHW is not None:
        channels, height, width = table.images_NCHW.shape[1:]
        lines.append(f"images: {channels} x {height} x {width} (channels x height x width)")
        lines += _missing(("pixels",), np.isnan(table.images_NCHW).reshape(-1, 1))
    if table.numeric_NF is not None:
        lines.append(f"numeric columns: {len(table.numeric_names)} ({listed(table.numeric_names)})")
        lines += _missing(table.numeric_names, np.isnan(table.numeric_NF))
    if table.categorical is not None:
        lines.append(f"categorical columns: {len(table.categorical_names)}")
        for name, column_N in zip(table.categorical_names, table.categorical.T, strict=True):
            present = set(column_N.tolist()) - {None}
            lines.append(f"  {name!r}: {len(present)} categories")
        lines += _missing(table.categorical_names, no_text(table.categorical))
    if len(lines) == 1:
        lines.append("features: none")
    if table.labels is not None:
        lines += _label_summary(table.labels)
    return lines


def _missing(names: tuple[str, ...], missing_NF: npt.NDArray[np.bool_]) -> list[str]:
    counts = missing_NF.sum(axis=0).tolist()
    return [f"  {name!r}: {count} missing" for name, count in zip(names, counts, strict=True) if count]


def _label_summary(labels: npt.NDArray[Any]) -> list[str]:
    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MOST_CLASSES_SHOWN:
        if labels.dtype == object:
            return [f"labels: text, {len(values)} different values"]
        return [
            f"labels: numbers, {len(values)} different values from {labels.min():g} to {labels.max():g},"
            f" mean {labels.mean():g}, standard deviation {labels.std():g}"
        ]
    shown = [
        f"{value if isinstance(value, str) else f'{value:g}'}: {n}" for value, n in zip(values, counts, strict=True)
    ]
    return [f"labels: {len(values)} different values", *(f"  {line}" for line in shown)]
