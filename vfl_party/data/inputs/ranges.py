"""Computes the range of each numeric column in training, and counts the numbers of other rows
outside this range.

The span of a column is four numbers: minimum, 1 % quantile, 99 % quantile, maximum. A number is
outside if it is beyond the minimum or maximum, and its distance from the nearer quantile is more
than three times the distance between the quantiles. Few numbers are outside by chance, even in
skewed columns such as incomes. If more than half of the numbers of a column are beyond the
quantiles, all of these count as outside. So a column in another unit is noticed even if its numbers
are smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vfl_party.data.row_arrays import parts, release

Floats = npt.NDArray[np.float32]
# The span of a column; empty if the column has no number in the training rows.
Span = tuple[float, ...]

# Numbers further from a quantile than this multiple of the quantiles' distance are outside.
_FAR = 3.0
# The maximum number of training rows that are sampled for the quantiles.
_SAMPLE_ROWS = 100_000
# The maximum number of values whose quantiles are computed at once.
_CHUNK = 1 << 25
# The minimum number of values in a column for the rule about more than half of them.
_MIN_NUMBERS = 5


def spans_of(values_NF: Floats, rows: npt.NDArray[np.int64]) -> tuple[Span, ...]:
    """Computes the span of each column in the given rows.

    Args:
        values_NF: The values, float32 [N, F], NaN if missing.
        rows: The rows, int64 [R].
    """
    width = values_NF.shape[1]
    low_F, high_F = np.full(width, np.inf), np.full(width, -np.inf)
    for part in parts(len(rows)):
        values_BF = values_NF[rows[part]]
        low_F = np.fmin(low_F, np.fmin.reduce(values_BF, axis=0))
        high_F = np.fmax(high_F, np.fmax.reduce(values_BF, axis=0))
        release(values_NF)
    sample = rows[:: max(1, -(-len(rows) // _SAMPLE_ROWS))]
    result: list[Span] = []
    step = max(1, _CHUNK // len(sample))
    for start in range(0, width, step):
        columns = values_NF[sample, start : start + step]
        release(values_NF)
        for column, values_N in enumerate(columns.T, start):
            present_N = values_N[~np.isnan(values_N)]
            if len(present_N):
                low, high = np.quantile(present_N, (0.01, 0.99)).tolist()
                result.append((float(low_F[column]), low, high, float(high_F[column])))
            else:
                result.append(())
    return tuple(result)


def count_outside(values_NF: Floats, spans: Sequence[Span]) -> npt.NDArray[np.int64]:
    """Counts the numbers of each column that are outside its span, int64 [F]. ``values_NF``: The
    values, float32 [N, F].
    """
    width = len(spans)
    far_F, beyond_F, present_F = (np.zeros(width, np.int64) for _ in range(3))
    has_span = np.array([bool(span) for span in spans], bool)
    low_F, quantile_low_F, quantile_high_F, high_F = (
        np.array([span or (0.0,) * 4 for span in spans]).reshape(width, 4).T
    )
    reach_F = _FAR * (quantile_high_F - quantile_low_F)
    low_F, high_F = (
        np.minimum(low_F, quantile_low_F - reach_F),
        np.maximum(high_F, quantile_high_F + reach_F),
    )
    for part in parts(len(values_NF)):
        # Comparisons with NaN are false, so missing values are not counted.
        values_BF = values_NF[part]
        far_F += ((values_BF < low_F) | (values_BF > high_F)).sum(axis=0)
        beyond_F += ((values_BF < quantile_low_F) | (values_BF > quantile_high_F)).sum(axis=0)
        present_F += (~np.isnan(values_BF)).sum(axis=0)
        release(values_NF)
    mostly_beyond = (2 * beyond_F > present_F) & (present_F >= _MIN_NUMBERS)
    return np.where(has_span, np.where(mostly_beyond, beyond_F, far_F), 0)
