"""Finds columns of numbers that are empty, or in which a number such as -999 stands for an empty
cell.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vfl_party.data.checks import count_cells
from vfl_party.data.columns import Columns

_STAND_INS = (-9, -99, -999, -9999, -99999, 999, 9999, 99999, 999999)
# The number of first rows that are examined.
_FIRST_ROWS = 100_000
# The minimum number of cells with the same number.
_MIN_CELLS = 2


def find_odd_numbers(columns: Columns) -> Iterator[tuple[str, str]]:
    """Yields the column's name and a note for each problem."""
    names, values_NF = columns.numeric_names, columns.numeric_NF
    empty = count_cells(values_NF, np.isnan).counts == len(values_NF)
    for column, name in enumerate(names):
        if empty[column]:
            yield name, f"column {name!r} is empty in all rows. List it in data.drop."
            continue
        value, count = _find_stand_in(values_NF[:_FIRST_ROWS, column])
        if count and columns.style is None:
            yield (
                name,
                f"{count:,} cells of {name!r} are {value}, far from all others. Clear these cells "
                "if the number stands for an empty cell.",
            )
        elif count:
            yield (
                name,
                f"{count:,} cells of {name!r} are {value}, far from all others. List the number in "
                "data.na if it stands for an empty cell.",
            )


def _find_stand_in(values_N: npt.NDArray[np.float32]) -> tuple[int, int]:
    """Returns a number that may stand for an empty cell, and its count; (0, 0) if there is none.

    Such a number is further from all other numbers than these are from each other, or it is the
    only number below 0.
    """
    values_N = values_N[~np.isnan(values_N)]
    low, high = float(values_N.min(initial=np.inf)), float(values_N.max(initial=-np.inf))
    for value in (low, high):
        if value not in _STAND_INS:
            continue
        others_N = values_N[values_N != value]
        count = len(values_N) - len(others_N)
        if count < _MIN_CELLS or not len(others_N):
            continue
        lowest, highest = float(others_N.min()), float(others_N.max())
        gap = lowest - value if value == low else value - highest
        if gap > max(highest - lowest, 1.0) or value < 0 <= lowest:
            return int(value), count
    return 0, 0
