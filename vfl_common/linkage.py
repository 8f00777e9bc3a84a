"""Compares keyed encodings of rows, and links the rows of two tables one to one.

An encoding is a cryptographic long-term key (CLK; Schnell, Bachteler and Reiher 2009): a Bloom
filter of the bigrams of all fields of a row. Rows of the same person have similar encodings, also
with typing errors. The similarity of two encodings is the cosine of their bits, corrected for the
bits that two random encodings have in common: 1 for equal encodings, and 0 on average for unrelated
rows.

The threshold is estimated without known links. The most similar other row of the same table shows
how similar unrelated rows are, because a table has a person once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The rows that are compared at once; the candidates of a row; the minimum similarity of a
# candidate.
_TILE, _CANDIDATES, _FLOOR = 2048, 4, 0.1
# The rows whose similarity to other rows of their table is measured.
_SAMPLE = 5000
_GRID = np.arange(0.2, 0.95, 0.005)
# The bits and bytes of an encoding, the encodings in a message, and the maximum rows of a party.
BITS, ENCODING_BYTES = 1024, 128
ROWS_A_BATCH, MAX_ROWS = 4096, 100_000
Encodings = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Links(NamedTuple):
    """The links between two tables.

    Args:
        first: The positions of the linked rows in the first table, int64 [N].
        second: Those in the second table, int64 [N].
        similarity: The similarity of each linked pair, float32 [N].
        probability: The estimated probability that each pair is right, float32 [N].
        threshold: The minimum similarity of a link.
        precision: The estimated share of the links that are right.
        recall: The estimated share of the true pairs that are linked.
    """

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    similarity: Floats
    probability: Floats
    threshold: float
    precision: float
    recall: float


def link(first_NB: Encodings, second_MB: Encodings, threshold: float | None = None) -> Links:
    """Links the rows of two tables one to one, the most similar pairs first.

    Args:
        first_NB: The encodings of the first table, uint8 [N, bytes].
        second_MB: Those of the second table, uint8 [M, bytes].
        threshold: The minimum similarity of a link; None to estimate the one with the highest F1.
    """
    rows, columns, similarity = _assign(*_find_candidates(first_NB, second_MB))
    size = min(len(first_NB), len(second_MB))
    # Rows of the smaller table without a candidate have no similarity.
    best = np.zeros(size, np.float32)
    best[: len(similarity)] = similarity
    nulls = [_measure_unrelated(encodings) for encodings in (first_NB, second_MB)]
    null = max(nulls, key=lambda values: float(np.quantile(values, 0.99)))
    # Pairs that are as dissimilar as unrelated rows show the share of rows without a partner.
    low = np.quantile(null, 0.9)
    single = min(1.0, float(np.mean(best < low)) / max(1e-9, float(np.mean(null < low))))
    # One more than observed, as in target-decoy estimates, so that few rows do not look certain.
    wrong = single * (1 + size * np.array([np.mean(null >= t) for t in _GRID]))
    linked = np.array([np.sum(best >= t) for t in _GRID])
    right = np.clip(linked - wrong, 0.0, None)
    true = max(1.0, size * (1.0 - single))
    if threshold is None:
        threshold = float(_GRID[np.argmax(2 * right / (linked + true))])
    is_link = similarity >= threshold
    at = min(int(np.searchsorted(_GRID, threshold - 1e-9)), len(_GRID) - 1)
    return Links(
        rows[is_link],
        columns[is_link],
        similarity[is_link],
        _estimate_probability(similarity[is_link], best, null, single),
        threshold,
        float(right[at] / max(1, linked[at])),
        min(1.0, float(right[at] / true)),
    )


def count_batches(rows: Iterable[int]) -> int:
    """Returns the number of batches of encodings. ``rows``: The number of rows of each party."""
    return -(-max(rows) // ROWS_A_BATCH)


def _unpack(encodings: Encodings) -> Floats:
    return np.unpackbits(encodings, axis=1).astype(np.float32)


def compare(first_NL: Floats, second_ML: Floats) -> Floats:
    """Returns the similarity of each pair, float32 [N, M]. ``L``: the bits of an encoding."""
    bits = first_NL.shape[1]
    first_N, second_M = first_NL.sum(1), second_ML.sum(1)
    common = first_NL @ second_ML.T
    random = first_N[:, None] * second_M[None] / bits
    scale = np.sqrt(first_N[:, None] * second_M[None]) - random
    # Rounding may exceed 1 if most bits are set.
    similarity: Floats = np.clip((common - random) / np.maximum(scale, 1e-6), -1.0, 1.0)
    return similarity


def _find_candidates(
    first_NB: Encodings, second_MB: Encodings
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Returns the pairs of each row of either table with its most similar rows of the other.

    A row has at least ``_CANDIDATES`` of them, so links may be missed among many equal rows.
    """
    candidates = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))
    for start in range(0, len(first_NB), _TILE):
        tile, pieces = _unpack(first_NB[start : start + _TILE]), [candidates]
        for other in range(0, len(second_MB), _TILE):
            similarity = compare(tile, _unpack(second_MB[other : other + _TILE]))
            for axis in (0, 1):
                count = min(_CANDIDATES, similarity.shape[axis])
                best = np.argpartition(-similarity, count - 1, axis=axis)
                best = best[:count] if axis == 0 else best[:, :count]
                grid = np.broadcast_to(
                    np.arange(best.shape[1]) if axis == 0 else np.arange(len(best))[:, None],
                    best.shape,
                )
                rows, columns = (best, grid) if axis == 0 else (grid, best)
                values = similarity[rows, columns].ravel()
                keep = values >= _FLOOR
                pieces.append(
                    (rows.ravel()[keep] + start, columns.ravel()[keep] + other, values[keep])
                )
        rows, columns, values = (np.concatenate(part) for part in zip(*pieces, strict=True))
        # Memory grows with the number of rows, not with that of pairs.
        keep = _is_best(rows, values) | _is_best(columns, values)
        candidates = (rows[keep], columns[keep], values[keep])
    return candidates


def _is_best(rows: npt.NDArray[np.int64], values: Floats) -> npt.NDArray[np.bool_]:
    """Returns which pairs are among the ``_CANDIDATES`` (twice, as a pair may occur twice) best of
    their row.
    """
    result = np.zeros(len(rows), bool)
    if not len(rows):
        return result
    order = np.lexsort((-values, rows))
    starts = np.r_[True, np.diff(rows[order]) > 0]
    firsts = np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))
    result[order] = np.arange(len(order)) - firsts < 2 * _CANDIDATES
    return result


def _assign(
    rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], similarity: Floats
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats]:
    """Returns pairs in which each row occurs once, the most similar pairs first."""
    order = np.lexsort((columns, rows, -similarity))
    used_rows, used_columns, pairs = set[int](), set[int](), list[int]()
    for at, row, column in zip(
        order.tolist(), rows[order].tolist(), columns[order].tolist(), strict=True
    ):
        if row not in used_rows and column not in used_columns:
            used_rows.add(row)
            used_columns.add(column)
            pairs.append(at)
    return rows[pairs], columns[pairs], similarity[pairs]


def _measure_unrelated(encodings_NB: Encodings) -> Floats:
    """Returns the similarity of rows to the most similar other row of their table, float32 [S]."""
    step = max(1, len(encodings_NB) // _SAMPLE)
    sample = np.arange(0, len(encodings_NB), step)
    best = np.zeros(len(sample), np.float32)
    for start in range(0, len(sample), _TILE):
        part = sample[start : start + _TILE]
        tile = _unpack(encodings_NB[part])
        for other in range(0, len(encodings_NB), _TILE):
            similarity = compare(tile, _unpack(encodings_NB[other : other + _TILE]))
            own = (part >= other) & (part < other + similarity.shape[1])
            similarity[np.flatnonzero(own), part[own] - other] = -1.0
            np.maximum(
                best[start : start + len(part)],
                similarity.max(1),
                out=best[start : start + len(part)],
            )
    return best


def _estimate_probability(similarity: Floats, best: Floats, null: Floats, single: float) -> Floats:
    """Returns the estimated probability that each pair is right; more for a greater similarity."""
    edges = np.linspace(0.0, 1.0 + 1e-6, 41)
    # Rows without a candidate are not links.
    observed, _ = np.histogram(best[best > 0.0], edges)
    wrong, _ = np.histogram(null, edges)
    expected = single * len(best) * wrong / len(null)
    right = np.clip(1.0 - expected / np.maximum(observed, 1), 0.0, 1.0)
    # Few pairs that are as dissimilar as most unrelated rows say nothing.
    right[edges[1:] <= np.quantile(null, 0.9)] = 0.0
    right = _make_monotonic(right, np.maximum(observed, 1e-3))
    at = np.clip(np.searchsorted(edges, similarity, side="right") - 1, 0, len(right) - 1)
    probability: Floats = right[at].astype(np.float32)
    return probability


def _make_monotonic(
    values: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Returns the nearest values that never decrease (pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] >= value:
            other, other_weight, other_size = pools.pop()
            value = (value * weight + other * other_weight) / (weight + other_weight)
            weight, size = weight + other_weight, size + other_size
        pools.append((value, weight, size))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
