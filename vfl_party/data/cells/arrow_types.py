"""Classifies Arrow types into the kinds of a party's table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a column holds numbers. A column with only nulls counts as numbers."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def is_time(kind: pa.DataType) -> bool:
    """Returns whether a column holds dates, with or without a time."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column holds text or booleans, including dictionary-encoded text."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_boolean(kind)
        or (types.is_dictionary(kind) and is_text(kind.value_type))
    )


def to_floats(column: pa.Array) -> npt.NDArray[np.float64]:
    """Converts a column to float64 [B], with NaN for null."""
    values: npt.NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values
