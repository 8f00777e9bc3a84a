"""Statistics of the training rows: what fills gaps, shifts and scales."""

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

# Rows that are summed at once.
CHUNK = 4096
# Of a chunk as float64: large images are fewer.
CHUNK_BYTES = 1 << 27
MEDIAN_BYTES = 1 << 28

Doubles = npt.NDArray[np.float64]


class Filled:
    """Values of which some rows are read at a time, with ``fill`` in the place of what is
    missing.
    """

    def __init__(self, table: Table, values: Pixels, fill: Doubles | None) -> None:
        self.shape = values.shape
        self._source, self._values = table.source, values
        self._fill = None if fill is None else fill.astype(np.float32).reshape(values.shape[1:])

    @property
    def chunk(self) -> int:
        """How many rows to work on at once."""
        size = 8 * math.prod(self.shape[1:])
        return max(1, min(CHUNK, CHUNK_BYTES // max(1, size)))

    def __getitem__(self, rows: Codes | slice) -> Floats:
        values = to_unit(self._values[rows])
        release(self._values)
        missing = np.isnan(values)
        if not missing.any():
            return values
        if self._fill is None:
            text = "has missing values, but training had none; fill them"
            raise checks.unusable(self._source, text)
        filled: Floats = np.where(missing, self._fill, values)
        return filled


def fill_values(values: Pixels, rows: Codes, policy: str) -> Doubles:
    """Returns [F]: mean or median of the present values, zero if there are none."""
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
    # Columns whose training rows are in memory at once.
    step = max(1, MEDIAN_BYTES // (4 * max(1, len(rows))))
    for start in range(0, width, step):
        columns = np.concatenate(
            [to_unit(values_NF[rows[part], start : start + step]) for part in parts(len(rows))]
        )
        release(values)
        present = ~np.isnan(columns).all(axis=0)
        fill_F[start : start + step][present] = np.nanmedian(columns[:, present], axis=0)
    return fill_F


def scaling(values: Filled, rows: Codes, policy: str) -> tuple[Doubles, Doubles]:
    """Returns shift and scale by column or channel. Constant ones are only shifted; ``minmax``
    keeps pixels in 0..1.
    """
    axes = tuple(axis for axis in range(len(values.shape)) if axis != 1)
    chunks = [rows[part] for part in parts(len(rows), values.chunk)]
    found = [_summed(values[chunk], axes) for chunk in chunks]
    low = np.min([each.low for each in found], axis=0).astype(np.float64)
    high = np.max([each.high for each in found], axis=0).astype(np.float64)
    zero, one = np.zeros_like(low), np.ones_like(low)
    if policy == "none":
        return zero, one
    if policy == "minmax":
        if len(values.shape) == 4 and low.min() >= 0.0 and high.max() <= 1.0:
            return zero, one
        shift, scale = low, high - low
    else:
        count = len(rows) * math.prod(values.shape[2:])
        shift = np.sum([each.total for each in found], axis=0) / count
        centre = shift.reshape(1, -1, *(1 for _ in values.shape[2:]))
        scale = np.sqrt(
            np.sum([((values[chunk] - centre) ** 2).sum(axis=axes) for chunk in chunks], axis=0)
            / count
        )
    constant = low == high
    return np.where(constant, low, shift), np.where(constant, one, scale)


@dataclass(frozen=True)
class _Summed:
    """Least, greatest and total value of each column or channel in some rows."""

    low: Floats
    high: Floats
    total: Doubles


def _summed(values_B: Floats, axes: tuple[int, ...]) -> _Summed:
    return _Summed(
        values_B.min(axis=axes), values_B.max(axis=axes), values_B.sum(axis=axes, dtype=np.float64)
    )
