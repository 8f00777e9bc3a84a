"""Defines a sequence of ids that takes little more memory than their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.ids.packed import CHUNK, release_texts, take_texts
from vfl_party.data.row_arrays import IN_MEMORY, Space


class Ids(Sequence[str]):
    """A sequence of ids (str) that takes little more memory than their text.

    Args:
        values: The ids as Arrow's large strings, without nulls.
        space: The space for many ids.
    """

    def __init__(self, values: pa.LargeStringArray, space: Space = IN_MEMORY) -> None:
        self.values, self.space = values, space

    @classmethod
    def of(cls, texts: Iterable[str]) -> Ids:
        """Converts ids to ``Ids``. An ``Ids`` is returned unchanged."""
        return texts if isinstance(texts, Ids) else cls(pa.array(texts, pa.large_string()))

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Ids:
        """Returns the ids of the given rows, int64 [B], in their order. Raises InputError if the
        disk is full.
        """
        return Ids(take_texts(self.values, rows, self.space), self.space)

    def among(self, others: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns whether each id is in ``others``, bool [N]."""
        mask: npt.NDArray[np.bool_] = pc.is_in(
            self.values, value_set=Ids.of(others).values
        ).to_numpy(False)
        return mask

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Ids: ...
    def __getitem__(self, at: int | slice) -> str | Ids:
        if isinstance(at, slice):
            return Ids(self.values[at], self.space)
        text: str = self.values[at].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), CHUNK):
            texts = self.values.slice(start, CHUNK).to_pylist()
            release_texts(self.values)
            yield from texts

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return bool(self.values.equals(other.values))
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(map(str.__eq__, self, other))
        )

    def __repr__(self) -> str:
        return f"Ids({len(self)})"
