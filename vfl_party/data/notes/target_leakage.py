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
# The minimum number of rows outside the largest class. Fewer rows may be separated by chance.
MIN_OTHERS = 10
# The minimum mean number of rows for each value of a column.
ROWS_A_VALUE = 10
# The number of rows of each class that are examined first.
_SAMPLED = 1_000

Codes = npt.NDArray[np.int32]


def find_target_leakage(rows: Rows, label: str) -> Iterator[Smell]:
    """Yields a note for each column that determines the class of every row.

    Such a column has far fewer values than rows, and each value occurs in only one class. Or there
    are two classes, and the column's cells are missing in exactly one class, or all numbers in one
    class are greater than all numbers in the other class. ``label``: The name of the label column.
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
        # Indexing copies the values, so it is skipped if all rows have labels.
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
    sample_BF, sample_classes_B = values_NF[sample], classes_N[sample]
    release(values_NF)
    for k, name in enumerate(names):
        if not (
            _separates(sample_BF[:, k], sample_classes_B, count)
            or _determines(sample_BF[:, k], sample_classes_B, count)
        ):
            continue
        column_N = np.concatenate([values_NF[part, k] for part in parts(len(values_NF))])
        release(values_NF)
        has_few_values = _count_distinct(column_N) * ROWS_A_VALUE <= len(column_N)
        if _separates(column_N, classes_N, count) or (
            has_few_values and _determines(column_N, classes_N, count)
        ):
            yield name


def _count_distinct(values_N: npt.NDArray[np.generic]) -> int:
    return len(np.unique(values_N))


def _determines(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether each value, including the missing value, occurs in only one class."""
    values, places_N = np.unique(values_N, return_inverse=True)
    return len(values) > 1 and _count_distinct(
        places_N.reshape(-1).astype(np.int64) * count + classes_N
    ) == len(values)


def _separates(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether there are two classes, and either cells are missing in exactly one class, or
    all numbers in one class are greater than all numbers in the other.
    """
    if count != 2:
        return False
    is_number = values_N.dtype.kind == "f"
    missing_N = np.isnan(values_N) if is_number else values_N == -1
    if missing_N.any() or not is_number:
        return bool((missing_N == classes_N).all() or (missing_N != classes_N).all())
    first_class, second_class = (values_N[classes_N == code] for code in (0, 1))
    return bool(first_class.max() < second_class.min() or second_class.max() < first_class.min())
