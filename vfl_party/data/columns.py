"""Defines the result of reading a table: ids, labels and features of all rows, before they are
checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.table import Categories


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
