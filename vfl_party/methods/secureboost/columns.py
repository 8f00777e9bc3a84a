"""Converts a party's columns to small integer codes for trees: one code for each cell, learned from
the training rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.methods.secureboost.settings import MAX_CODES
from vfl_party.phases.context import Party

# The code of a cell whose value does not occur in training. At a split, it follows the majority of
# rows.
ELSEWHERE = -1
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Column:
    """Converts the cells of a column to codes.

    ``cuts``: the thresholds of a numeric column, where a number's code is the number of cuts below
    it; None for a categorical column. ``categories``: the preprocessing codes that occur in
    training, ascending, where a category's index is its code. ``missing``: whether numbers are
    missing in training; the last code then stands for a missing number.
    """

    name: str
    cuts: tuple[float, ...] | None = None
    missing: bool = False
    categories: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of codes."""
        return len(self.categories) if self.cuts is None else len(self.cuts) + 1 + self.missing

    def codes(self, cells_N: npt.NDArray[Any]) -> Codes:
        """Returns the code of each cell."""
        if self.cuts is None:
            known = np.array(self.categories, np.int64)
            places = np.searchsorted(known, cells_N).clip(max=len(known) - 1)
            return np.where(known[places] == cells_N, places, ELSEWHERE).astype(np.int8)
        bins = np.searchsorted(np.array(self.cuts), cells_N.astype(np.float64), side="left")
        missing = self.size - 1 if self.missing else ELSEWHERE
        return np.where(np.isnan(cells_N), missing, bins).astype(np.int8)


def cells(party: Party) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]:
    """Returns the party's numbers [N, F], with NaN for missing ones, the preprocessing codes of its
    categories [N, K], and all column names. Raises InputError without columns.
    """
    if party.data.columns is None:
        raise InputError(
            Code.DATA_INVALID,
            f"{party.name}: has no features. Add a [data] table to the party file.",
        )
    return party.data.columns()


def learn_columns(party: Party, bins: int, rows: Rows) -> list[Column]:
    """Learns the codes of the columns from ``rows``, numeric columns first.

    Raises InputError if a column has too many categories, or if all columns are constant.
    """
    numbers_NF, codes_NK, names = cells(party)
    width, columns = numbers_NF.shape[1], []
    for f in range(width):
        values = numbers_NF[rows, f].astype(np.float64)
        present = values[~np.isnan(values)]
        columns.append(
            Column(names[f], tuple(cuts(present, bins)), missing=0 < len(present) < len(values))
        )
    for k in range(codes_NK.shape[1]):
        categories = tuple(np.unique(codes_NK[rows, k]).tolist())
        if len(categories) > MAX_CODES:
            raise InputError(
                Code.DATA_INVALID,
                f"{party.name}: column {names[width + k]!r} must have at most {MAX_CODES} "
                f"categories for trees (got {len(categories)}). Group some of them, or drop the "
                "column.",
            )
        columns.append(Column(names[width + k], categories=categories))
    if not any(column.size > 1 for column in columns):
        raise InputError(
            Code.DATA_INVALID,
            f"{party.name}: all columns are constant in the training rows, so trees cannot use "
            "them. Add other columns.",
        )
    return columns


def cuts(values: npt.NDArray[np.float64], bins: int) -> list[float]:
    """Returns at most ``bins`` - 1 cuts halfway between ``values`` [N], at quantiles if there are
    more different values than bins.
    """
    ordered = np.sort(values)
    distinct, first_places = np.unique(ordered, return_index=True)
    if len(distinct) > bins:
        # Quantiles are cut at these positions, or at the next different value.
        quantile_places = np.arange(1, bins) * len(ordered) // bins
        ends = np.unique(np.searchsorted(first_places, quantile_places, side="left"))
        ends = ends[(ends > 0) & (ends < len(distinct))]
    else:
        ends = np.arange(1, len(distinct))
    return ((distinct[ends - 1] + distinct[ends]) / 2).tolist() if len(distinct) else []


def encode_rows(party: Party, columns: list[Column]) -> Codes:
    """Returns the codes of all rows, [N, columns]."""
    numbers_NF, codes_NK, _ = cells(party)
    return encode_cells(columns, numbers_NF, codes_NK)


def encode_cells(
    columns: list[Column], numbers_NF: npt.NDArray[np.float32], codes_NK: npt.NDArray[np.int64]
) -> Codes:
    """Returns the codes [N, columns] of rows with these numbers and categories."""
    columns_of_cells = [*numbers_NF.T, *codes_NK.T]
    return np.stack(
        [column.codes(cells_N) for column, cells_N in zip(columns, columns_of_cells, strict=True)],
        axis=1,
    )


def sample_columns(
    seed: int, phase: str, party: str, round_: int, count: int, share: float
) -> list[int]:
    """Draws the columns that a round's trees use, ascending; at least one."""
    if share == 1.0:
        return list(range(count))
    order = draw_permutation(derive_seed(seed, phase, "columns", party, round_), count)
    return sorted(order[: max(1, round(share * count))].tolist())
