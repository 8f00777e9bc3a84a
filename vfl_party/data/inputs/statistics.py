"""Computes statistics of the training rows: fill values for missing cells, shifts and scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.data import checks
from vfl_party.data.inputs.features import Codes, Floats
from vfl_party.data.pixels import Pixels, to_unit
from vfl_party.data.row_arrays import parts, release
from vfl_party.data.table import Table

# The maximum number of rows that are summed at once.
CHUNK = 4096
# The maximum size of a chunk as float64 in bytes, so that a chunk has fewer large images.
CHUNK_BYTES = 1 << 27
MEDIAN_BYTES = 1 << 28
# The maximum number of quantiles of a column.
MAX_QUANTILES = 1000
# Values within this distance of the smallest or largest training value count as beyond it, as in
# scikit-learn.
_EDGE = 1e-7

Doubles = npt.NDArray[np.float64]


class FilledValues:
    """The values of a table, read in blocks of rows, with missing cells replaced by ``fill``."""

    def __init__(self, table: Table, values: Pixels, fill: Doubles | None) -> None:
        self.shape = values.shape
        self._source, self._values = table.source, values
        self._fill = None if fill is None else fill.astype(np.float32).reshape(values.shape[1:])

    @property
    def chunk(self) -> int:
        """The number of rows to process at once."""
        size = 8 * math.prod(self.shape[1:])
        return max(1, min(CHUNK, CHUNK_BYTES // max(1, size)))

    def __getitem__(self, rows: Codes | slice) -> Floats:
        values = to_unit(self._values[rows])
        release(self._values)
        missing = np.isnan(values)
        if not missing.any():
            return values
        if self._fill is None:
            raise checks.unusable(
                self._source, "has missing values, but training had none. Fill them."
            )
        filled: Floats = np.where(missing, self._fill, values)
        return filled


def fill_values(values: Pixels, rows: Codes, policy: str) -> Doubles:
    """Returns the fill value of each column, float64 [F]: the mean or median of the present values,
    or zero.

    Args:
        values: The values, [N, …], NaN if missing.
        rows: The training rows, int64.
        policy: The value of ``data.missing``.
    """
    values_NF = values.reshape(len(values), -1)
    width = values_NF.shape[1]
    fill_F = np.zeros(width)
    if policy == "zero":
        return fill_F
    if policy == "mean":
        counts, sums = np.zeros(width), np.zeros(width)
        for part in parts(len(rows)):
            values_BF = to_unit(values_NF[rows[part]])
            present = ~np.isnan(values_BF)
            counts += present.sum(axis=0)
            sums += np.where(present, values_BF, 0.0).sum(axis=0, dtype=np.float64)
            release(values)
        return np.divide(sums, counts, out=fill_F, where=counts > 0)
    # The number of columns that are in memory at once.
    step = max(1, MEDIAN_BYTES // (4 * max(1, len(rows))))
    for start in range(0, width, step):
        columns = np.concatenate(
            [to_unit(values_NF[rows[part], start : start + step]) for part in parts(len(rows))]
        )
        release(values)
        present = ~np.isnan(columns).all(axis=0)
        fill_F[start : start + step][present] = np.nanmedian(columns[:, present], axis=0)
    return fill_F


def compute_scaling(values: FilledValues, rows: Codes, policy: str) -> tuple[Doubles, Doubles]:
    """Computes the shift and the scale of each column or channel, float64.

    Constant columns are only shifted. ``minmax`` does not change pixels that are in 0..1 already.
    ``quantile`` neither shifts nor scales, see ``compute_quantiles``.
    """
    axes = tuple(axis for axis in range(len(values.shape)) if axis != 1)
    chunks = [rows[part] for part in parts(len(rows), values.chunk)]
    row_sums = [_sum_rows(values[chunk], axes) for chunk in chunks]
    low = np.min([chunk.low for chunk in row_sums], axis=0).astype(np.float64)
    high = np.max([chunk.high for chunk in row_sums], axis=0).astype(np.float64)
    zero, one = np.zeros_like(low), np.ones_like(low)
    if policy in ("none", "quantile"):
        return zero, one
    if policy == "minmax":
        if len(values.shape) == 4 and low.min() >= 0.0 and high.max() <= 1.0:
            return zero, one
        shift, scale = low, high - low
    else:
        count = len(rows) * math.prod(values.shape[2:])
        shift = np.sum([chunk.total for chunk in row_sums], axis=0) / count
        shift_BC = shift.reshape(1, -1, *(1 for _ in values.shape[2:]))
        scale = np.sqrt(
            np.sum([((values[chunk] - shift_BC) ** 2).sum(axis=axes) for chunk in chunks], axis=0)
            / count
        )
    is_constant = low == high
    return np.where(is_constant, low, shift), np.where(is_constant, one, scale)


def compute_quantiles(values: FilledValues, rows: Codes) -> Doubles:
    """Computes up to ``MAX_QUANTILES`` evenly spaced quantiles of each column, float64 [F, Q]."""
    levels_Q = np.linspace(0.0, 100.0, min(MAX_QUANTILES, len(rows)))
    quantiles_FQ = np.empty((values.shape[1], len(levels_Q)))
    # The number of columns that are in memory at once.
    step = max(1, MEDIAN_BYTES // (8 * max(1, len(rows))))
    for start in range(0, len(quantiles_FQ), step):
        columns = np.concatenate(
            [
                values[rows[part]][:, start : start + step].astype(np.float64)
                for part in parts(len(rows), values.chunk)
            ]
        )
        # Rounding errors must not make a quantile smaller than the previous one.
        quantiles_FQ[start : start + step] = np.maximum.accumulate(
            np.percentile(columns, levels_Q, axis=0).T, axis=1
        )
    return quantiles_FQ


def to_normal(values_B: Doubles, quantiles_Q: Doubles) -> Doubles:
    """Maps values [B] by their rank among the quantiles [Q] to a normal distribution, as
    scikit-learn's ``QuantileTransformer`` does.

    Equal values get the mean of their ranks. Values at or beyond the ends are clipped to ±5.2. A
    column that is constant in training is only shifted.
    """
    # Imported here, so that only a party with quantile scaling loads SciPy.
    from scipy.special import ndtri

    low, high = quantiles_Q[0], quantiles_Q[-1]
    if low == high:
        shifted_B: Doubles = values_B - low
        return shifted_B
    levels_Q = np.linspace(0.0, 1.0, len(quantiles_Q))
    up_B = np.interp(values_B, quantiles_Q, levels_Q)
    down_B = np.interp(-values_B, -quantiles_Q[::-1], -levels_Q[::-1])
    rank_B: Doubles = 0.5 * (up_B - down_B)
    rank_B[values_B + _EDGE > high] = 1.0
    rank_B[values_B - _EDGE < low] = 0.0
    lowest, highest = ndtri(_EDGE - np.spacing(1)), ndtri(1 - (_EDGE - np.spacing(1)))
    clipped: Doubles = np.clip(ndtri(rank_B), lowest, highest)
    return clipped


@dataclass(frozen=True)
class _RowSums:
    """The minimum, maximum and sum of each column or channel in some rows."""

    low: Floats
    high: Floats
    total: Doubles


def _sum_rows(values_B: Floats, axes: tuple[int, ...]) -> _RowSums:
    return _RowSums(
        values_B.min(axis=axes), values_B.max(axis=axes), values_B.sum(axis=axes, dtype=np.float64)
    )
