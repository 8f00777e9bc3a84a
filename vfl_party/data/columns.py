"""The result of a reader of tables: ids, labels and features of all rows, before they are
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
        numeric_NF: float32 [N, F], NaN if missing.
        categorical: the categories of the other columns.
        kinds: {numeric column: ``date`` or the dropped sign}, if it was not bare numbers.
        style: (decimal point, thousands separator) of cells that were text; None otherwise.
    """

    numeric_NF: npt.NDArray[np.float32]  # noqa: N815 - the shape is part of the name
    numeric_names: tuple[str, ...]
    categorical: Categories
    categorical_names: tuple[str, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    style: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Rows:
    """A reader's result, in the order of the source, with ``limit`` applied.

    Args:
        ids: the columns of the id as read, each [N] text, None if missing.
        labels: [N] float64 or text (object), or None.
        features: columns, or pixels [N, C, H, W], or [N, F] to be arranged by ``image_shape``.
        splits: [N] text of ``SPLITS``, or None.
        notes: what was guessed.
        id_types: of the id columns, if the source declares them.
        separator: see ``Stream``.
        beside: {role column: its values, as labels}.
        numbered: whether the id is the row number.
        unsorted: see ``Stream``.
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
        """Returns the columns of the id with the types of the source, such as integers."""
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
