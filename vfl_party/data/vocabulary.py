"""Collects the categories of one column, block by block."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data import checks

# The maximum number of categories of a column. A column with more is probably free text.
MAX_WORDS = 1 << 20


@dataclass
class Vocabulary:
    """The categories of one column, in the order in which they appear.

    ``buckets``: The number of buckets into which values are hashed. Each bucket is a category,
    named by its number. None if each value is a category.
    """

    source: str
    name: str
    places: dict[Any, int] = field(default_factory=dict)
    # The Arrow type of the values.
    kind: pa.DataType | None = None
    buckets: int | None = None
    seen: Digests = field(default_factory=lambda: Digests())

    def codes(self, column: pa.Array) -> npt.NDArray[np.int32]:
        """Converts cells to codes, int32 [B], -1 if missing. Raises InputError if there are too
        many categories.
        """
        encoded = pc.dictionary_encode(_category_values(column))
        values = encoded.dictionary.to_pylist()
        if self.buckets is None:
            self.kind = encoded.type.value_type
        else:
            digests_V = hash_values(values)
            self.kind, values = pa.int64(), (digests_V % np.uint64(self.buckets)).tolist()
            self.seen.add(digests_V)
        places = [self.places.setdefault(value, len(self.places)) for value in values]
        if len(self.places) > MAX_WORDS:
            raise checks.unusable(
                self.source,
                f"column {self.name!r} has more than {MAX_WORDS:,} categories. List it in "
                "data.drop, or in data.numeric if it holds numbers, or hash its values with "
                "data.categorical_buckets.",
            )
        local_B = pc.fill_null(encoded.indices, len(places)).to_numpy(zero_copy_only=False)
        codes_B: npt.NDArray[np.int32] = np.array([*places, -1], np.int32)[local_B]
        return codes_B

    def texts(self) -> tuple[str, ...]:
        """Returns the categories as text. Whole floats are written without '.0', so that 1 and 1.0
        are the same category.
        """
        values = pa.array(list(self.places), self.kind)
        if pa.types.is_floating(values.type):
            with contextlib.suppress(pa.ArrowInvalid):
                values = pc.cast(values, pa.int64())
        return tuple(pc.cast(values, pa.string()).to_pylist())

    def all_texts(self, codes_N: npt.NDArray[np.int32]) -> npt.NDArray[np.object_]:
        """Converts codes to text, object [N], None if missing. Equal texts share one object."""
        texts: npt.NDArray[np.object_] = np.array([*self.texts(), None], object)
        return texts[codes_N]

    def describe_shared(self) -> str:
        """Returns a note about the values that share a bucket; '' without buckets."""
        if self.buckets is None:
            return ""
        values = self.seen.all()
        used_buckets, value_counts = np.unique(values % np.uint64(self.buckets), return_counts=True)
        share = int(value_counts[value_counts > 1].sum())
        return (
            f"column {self.name!r}: {len(values):,} values are hashed into {self.buckets:,} "
            f"buckets, of which {len(used_buckets):,} are used, and {share:,} values share a "
            "bucket. To change this, set data.categorical_buckets."
        )


class Digests:
    """Collects the distinct digests of a column's values block by block, in eight bytes each."""

    def __init__(self) -> None:
        self._sorted_digests = np.empty(0, np.uint64)
        self._unsorted: list[npt.NDArray[np.uint64]] = []
        self._count = 0

    def add(self, digests_V: npt.NDArray[np.uint64]) -> None:
        """Adds digests, uint64 [V], which may have been added before."""
        self._unsorted.append(digests_V)
        self._count += len(digests_V)
        # The limit grows with the number of digests, so that they are sorted only a few times.
        if self._count > max(1 << 16, len(self._sorted_digests)):
            self.all()

    def all(self) -> npt.NDArray[np.uint64]:
        """Returns the distinct digests, ascending, uint64."""
        self._sorted_digests = np.unique(np.concatenate([self._sorted_digests, *self._unsorted]))
        self._unsorted, self._count = [], 0
        return self._sorted_digests


def hash_values(values: Sequence[Any]) -> npt.NDArray[np.uint64]:
    """Returns a digest of each value, uint64 [V]: the first 64 bits of BLAKE2b of its text. It is
    the same at every party and in every run.
    """
    texts = (
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value in values
    )
    data = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(data, ">u8").astype(np.uint64)


def decode(column: pa.Array) -> pa.Array:
    """Decodes a dictionary-encoded column to its values. Other columns are returned unchanged."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _category_values(column: pa.Array) -> pa.Array:
    """Returns the values of categories, null if missing. Floats stay floats, and other values
    become text.
    """
    column = decode(column)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        # Adding 0.0 converts -0.0 to 0.0.
        return pc.add(column, pa.scalar(0.0, column.type))
    text = pc.cast(column, pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
