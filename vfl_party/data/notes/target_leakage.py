"""Finds columns that determine the class of every row: they may have been recorded after the class
was known.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data import checks
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.notes.smells import Smell
from vfl_party.data.row_arrays import parts, release

MAX_CLASSES = 100
# Minimum rows outside the largest class: fewer are separated by chance.
MIN_OTHERS = 10
# Minimum rows for each value of a column, on average.
ROWS_A_VALUE = 10
# Rows of each class that are examined before all rows.
_SAMPLED = 1_000

Codes = npt.NDArray[np.int32]


def find_target_leakage(rows: Rows, label: str) -> Iterator[Smell]:
    """Yields a note, without any cell, for each column that determines the class of every row.

    Such a column has far fewer values than rows, each of them in rows of one class only. Or it is a
    number, or is missing, in rows of one of two classes only, or its numbers are greater in one
    class than in the other. ``label``: the name of the label column.
    """
    if rows.labels is None or not isinstance(rows.features, Columns):
        return
    labelled_N = ~checks.mask_unlabelled(rows.labels)
    encoded = pc.dictionary_encode(pa.array(rows.labels[labelled_N]))
    classes_N: Codes = encoded.indices.to_numpy(zero_copy_only=False)
    counts = np.bincount(classes_N)
    if not 2 <= len(counts) <= MAX_CLASSES or counts.sum() - counts.max() < MIN_OTHERS:
        return
    numbers, words = rows.features.numeric_NF, rows.features.categorical.codes_NK
    for values_NF, names in (
        (numbers, rows.features.numeric_names),
        (words, rows.features.categorical_names),
    ):
        # Indexing copies, so only if it is needed.
        values_NF = values_NF if labelled_N.all() else values_NF[labelled_N]
        for name in _find_columns(values_NF, names, classes_N, len(counts)):
            yield Smell(
                f"column {name!r} alone determines {label!r} in every row. If it is not known "
                "when you predict, list it in data.drop.",
                name,
            )


def _find_columns(
    values_NF: npt.NDArray[np.generic], names: tuple[str, ...], classes_N: Codes, count: int
) -> Iterator[str]:
    """Yields the names of the columns that determine the class, tested on a sample of each class
    and then on all rows.
    """
    sample = np.sort(
        np.concatenate([np.flatnonzero(classes_N == code)[:_SAMPLED] for code in range(count)])
    )
    some_BF, some_B = values_NF[sample], classes_N[sample]
    release(values_NF)
    for k, name in enumerate(names):
        if not (
            _separates(some_BF[:, k], some_B, count) or _determines(some_BF[:, k], some_B, count)
        ):
            continue
        column_N = np.concatenate([values_NF[part, k] for part in parts(len(values_NF))])
        release(values_NF)
        few = _different(column_N) * ROWS_A_VALUE <= len(column_N)
        if _separates(column_N, classes_N, count) or (
            few and _determines(column_N, classes_N, count)
        ):
            yield name


def _different(values_N: npt.NDArray[np.generic]) -> int:
    return len(np.unique(values_N))


def _determines(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether each value, and a missing one, is in rows of one class only."""
    values, places_N = np.unique(values_N, return_inverse=True)
    return len(values) > 1 and _different(
        places_N.reshape(-1).astype(np.int64) * count + classes_N
    ) == len(values)


def _separates(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether two classes differ only by missing cells, or by numbers that are greater in
    one than in the other.
    """
    if count != 2:
        return False
    is_number = values_N.dtype.kind == "f"
    missing_N = np.isnan(values_N) if is_number else values_N == -1
    if missing_N.any() or not is_number:
        return bool((missing_N == classes_N).all() or (missing_N != classes_N).all())
    one, other = (values_N[classes_N == code] for code in (0, 1))
    return bool(one.max() < other.min() or other.max() < one.min())
