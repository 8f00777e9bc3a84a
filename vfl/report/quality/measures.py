"""The metrics of kept predictions with their intervals, and the differences of two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl.report.quality.intervals import (
    Floats,
    Spread,
    auc_spread,
    c_index_spread,
    mean_spread,
    percentiles,
    resampled,
)
from vfl.report.quality.kept import KeptRows

# Resamples of the bootstrap; of many rows fewer, because each takes longer.
_RESAMPLES, _FEWER, _MANY_ROWS = 1_000, 400, 5_000
# So that a logarithm is finite.
_LEAST = 1e-15
# Rows of which all pairs are compared.
_MOST_PAIRED = 20_000
# Before the name of a metric: the difference of two.
_GAIN = "gain of "
DELONG, BOOTSTRAP, INFLUENCE = "DeLong", "bootstrap", "influence of each row"
# Metrics of which less is better.
LOWER = frozenset({"brier", "log_loss", "rmse", "mae"})
# The one that decides, by kind of task.
FIRST = {
    "binary": "auc",
    "multiclass": "accuracy",
    "multilabel": "auc",
    "regression": "rmse",
    "survival": "c_index",
    "ranking": "ndcg",
}
Statistic = Callable[[Floats], dict[str, float]]


@dataclass(frozen=True)
class Estimate:
    """A metric, or a difference of two, with its interval of 95 %; NaN if there is none. ``how``:
    it was found.
    """

    value: float
    low: float
    high: float
    how: str

    def better(self, metric: str) -> str:
        """Says whether a difference is ``better`` or ``worse``; only if the whole interval is."""
        low, high = (-self.high, -self.low) if metric in LOWER else (self.low, self.high)
        return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def measured(kept: KeptRows, resamples: int | None = None) -> dict[str, Estimate]:
    """Returns the metrics of one split with their intervals; those that are undefined are left
    out.
    """
    return _of_spreads(kept, _spreads(kept)) | _bootstrapped(kept, _statistic(kept), resamples)


def compared(
    kept: KeptRows, base: KeptRows, resamples: int | None = None
) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """Returns the metrics of ``base``, and those of ``kept`` minus them, with paired intervals; the
    two are of the same rows in the same order.
    """
    own, others = _spreads(kept), _spreads(base)
    how = _how(kept)
    gain = {}
    for name in own.keys() & others.keys():
        difference = own[name].minus(others[name])
        gain[name] = Estimate(difference.value, *difference.interval, how)
    one, other = _statistic(kept), _statistic(base)

    def both(times_N: Floats) -> dict[str, float]:
        mine, theirs = one(times_N), other(times_N)
        gains = {f"{_GAIN}{name}": mine[name] - theirs[name] for name in mine}
        return theirs | gains

    found = _bootstrapped(kept, both, resamples)
    theirs = {name: each for name, each in found.items() if not name.startswith(_GAIN)}
    gain |= {
        name.removeprefix(_GAIN): each for name, each in found.items() if name.startswith(_GAIN)
    }
    return _of_spreads(base, others) | theirs, gain


def differences(
    kept: KeptRows, base: KeptRows, resamples: int | None = None
) -> dict[str, Estimate]:
    """Returns the second of what ``compared`` does."""
    return compared(kept, base, resamples)[1]


def _how(kept: KeptRows) -> str:
    return INFLUENCE if kept.kind in ("multiclass", "survival") else DELONG


def _of_spreads(kept: KeptRows, spreads: Mapping[str, Spread]) -> dict[str, Estimate]:
    found = {}
    for name, spread in spreads.items():
        low, high = spread.interval
        found[name] = Estimate(spread.value, max(0.0, low), min(1.0, high), _how(kept))
    return found


def _bootstrapped(kept: KeptRows, of: Statistic, resamples: int | None) -> dict[str, Estimate]:
    rows = len(kept)
    resamples = resamples or (_FEWER if rows > _MANY_ROWS else _RESAMPLES)
    names = list(of(np.ones(rows)))
    if not names:
        return {}

    def vector(times_N: Floats) -> Floats:
        found = of(times_N)
        return np.array([found[name] for name in names])

    values_RT = resampled(rows, vector, resamples)
    return {
        name: Estimate(float(values_RT[0, at]), *percentiles(values_RT[1:, at]), BOOTSTRAP)
        for at, name in enumerate(names)
        if np.isfinite(values_RT[0, at])
    }


def _spreads(kept: KeptRows) -> dict[str, Spread]:
    """Returns the metrics that compare rows with each other, whose variance has a formula."""
    if kept.kind == "binary" and 0 < kept.truth_N.sum() < len(kept):
        return {"auc": auc_spread(kept.is_positive_N, kept.scores_N)}
    if kept.kind == "multiclass":
        # In float64 equal only where the probabilities are.
        there = [k for k in range(len(kept.classes)) if 0 < (kept.truth_N == k).sum() < len(kept)]
        each = [auc_spread(kept.truth_N == k, kept.scores_NO[:, k]) for k in there]
        return {"auc": mean_spread(each)} if each else {}
    if kept.kind == "multilabel":
        both = [k for k in range(len(kept.classes)) if 0 < kept.truth_N[:, k].sum() < len(kept)]
        each = [auc_spread(kept.truth_N[:, k] == 1, kept.scores_NO[:, k]) for k in both]
        return {"auc": mean_spread(each)} if each else {}
    if kept.kind == "survival" and len(kept) <= _MOST_PAIRED and kept.more_N is not None:
        found = c_index_spread(kept.truth_N, kept.more_N, kept.scores_N)
        return {} if found is None else {"c_index": found}
    return {}


def _statistic(kept: KeptRows) -> Statistic:
    """Returns what computes the other metrics of the rows, each counted as often as it is drawn."""
    made: Mapping[str, Callable[[KeptRows], Statistic]] = {
        "binary": _binary,
        "multiclass": _multiclass,
        "multilabel": _multilabel,
        "regression": _regression,
        "ranking": _ranking,
    }
    return made[kept.kind](kept) if kept.kind in made else lambda _times: {}


def _binary(kept: KeptRows) -> Statistic:
    y_N, p_N = kept.truth_N.astype(np.float64), kept.scores_N
    assert kept.decided_N is not None  # noqa: S101 - of classes
    d_N = kept.decided_N.astype(np.float64)
    terms_NT = np.stack(
        [y_N == d_N, y_N * d_N, (1 - y_N) * d_N, y_N * (1 - d_N), (p_N - y_N) ** 2, _log(p_N, y_N)],
        axis=1,
    ).astype(np.float64)
    ranked = Ranked(y_N, p_N)

    def of(times_N: Floats) -> dict[str, float]:
        accuracy, hits, false, missed, brier, log_loss = times_N @ terms_NT / times_N.sum()
        precision, ks = ranked.average_precision_and_ks(times_N)
        return {
            "average_precision": precision,
            "ks": ks,
            "accuracy": accuracy,
            "f1": _ratio(2 * hits, 2 * hits + false + missed),
            "precision": _ratio(hits, hits + false),
            "recall": _ratio(hits, hits + missed),
            "brier": brier,
            "log_loss": log_loss,
        }

    return of


def _multiclass(kept: KeptRows) -> Statistic:
    count, rows = len(kept.classes), np.arange(len(kept))
    assert kept.decided_N is not None  # noqa: S101 - of classes
    cell_N = kept.truth_N * count + kept.decided_N
    is_NC = np.zeros(kept.scores_NO.shape)
    is_NC[rows, kept.truth_N] = 1
    p_N = kept.scores_NO[rows, kept.truth_N]
    terms_NT = np.stack(
        [((kept.scores_NO - is_NC) ** 2).sum(axis=1), -np.log(np.maximum(p_N, _LEAST))], axis=1
    )

    def of(times_N: Floats) -> dict[str, float]:
        cells_CC = np.bincount(cell_N, times_N, count * count).reshape(count, count)
        hits_C, true_C, said_C = np.diag(cells_CC), cells_CC.sum(axis=1), cells_CC.sum(axis=0)
        there_C = (true_C + said_C) > 0
        f1_C = 2 * hits_C[there_C] / (true_C + said_C)[there_C]
        brier, log_loss = times_N @ terms_NT / times_N.sum()
        return {
            "accuracy": float(hits_C.sum() / times_N.sum()),
            "f1": float(f1_C.mean()),
            "brier": float(brier),
            "log_loss": float(log_loss),
        }

    return of


def _multilabel(kept: KeptRows) -> Statistic:
    y_NL, d_NL = kept.truth_N.astype(np.float64), (kept.scores_NO > 0.5).astype(np.float64)
    right_N = (y_NL == d_NL).mean(axis=1)
    brier_N = ((kept.scores_NO - y_NL) ** 2).mean(axis=1)

    def of(times_N: Floats) -> dict[str, float]:
        hits_L = times_N @ (y_NL * d_NL)
        both_L = times_N @ (y_NL + d_NL)
        f1_L = np.divide(2 * hits_L, both_L, out=np.zeros_like(hits_L), where=both_L > 0)
        accuracy, brier = (float(times_N @ each / times_N.sum()) for each in (right_N, brier_N))
        return {"accuracy": accuracy, "f1": float(f1_L.mean()), "brier": brier}

    return of


def _regression(kept: KeptRows) -> Statistic:
    y_N = kept.truth_N.astype(np.float64)
    e_N = kept.scores_N - y_N
    # Of a label far from 0 the squares would lose the digits of its spread.
    y_N = y_N - y_N.mean()
    terms_NT = np.stack([e_N**2, np.abs(e_N), e_N, y_N, y_N**2], axis=1)

    def of(times_N: Floats) -> dict[str, float]:
        square, absolute, error, y, y_square = (times_N @ terms_NT / times_N.sum()).tolist()
        spread = y_square - y * y
        return {
            "rmse": float(np.sqrt(square)),
            "mae": absolute,
            "r2": 1 - square / spread if spread > 0 else float("nan"),
            "bias": error,
        }

    return of


def _ranking(kept: KeptRows) -> Statistic:
    """NDCG of each query of two rows or more of which one is relevant; the rows of a query are
    drawn together.
    """
    assert kept.more_N is not None  # noqa: S101 - of queries
    values: list[float] = []
    first_N = np.zeros(len(kept), np.int64)
    _, query_N = np.unique(kept.more_N, return_inverse=True)
    order = np.argsort(query_N, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(query_N[order])) + 1):
        if len(rows) > 1 and (kept.truth_N[rows] > 0).any():
            first_N[rows[0]] = len(values) + 1
            values.append(_ndcg(kept.truth_N[rows], kept.scores_N[rows]))
    if not values:
        return lambda _times: {}
    value_N = np.array([0.0, *values])[first_N]
    is_first_N = (first_N > 0).astype(np.float64)

    def of(times_N: Floats) -> dict[str, float]:
        queries = float(times_N @ is_first_N)
        return {"ndcg": float(times_N @ value_N) / queries if queries else float("nan")}

    return of


def _ndcg(gains_N: Floats, scores_N: Floats) -> float:
    """Returns NDCG of one query (Järvelin and Kekäläinen 2002); equal scores share their places."""
    # As scikit-learn's ndcg_score, which takes a millisecond for each query.
    discounts = 1 / np.log2(np.arange(len(gains_N)) + 2)
    _, at, counts = np.unique(-scores_N, return_inverse=True, return_counts=True)
    shared = np.add.reduceat(discounts, np.cumsum(counts) - counts) / counts
    return float(shared[at] @ gains_N / (np.sort(gains_N)[::-1] @ discounts))


class Ranked:
    """Rows of two classes in the order of their scores, the highest first."""

    def __init__(self, y_N: Floats, scores_N: Floats) -> None:
        self._order_N = np.argsort(-scores_N, kind="stable")
        self._y_N = y_N[self._order_N]
        ordered_N = scores_N[self._order_N]
        # The last row of each that has the same score.
        self._ends: npt.NDArray[np.int64] = np.flatnonzero(np.append(np.diff(ordered_N) != 0, True))

    def average_precision_and_ks(self, times_N: Floats) -> tuple[float, float]:
        """Returns the mean of precision over the recall that it is reached with, and the largest
        distance of the two classes' distributions of scores; NaN if a class is not drawn.
        """
        times_N = times_N[self._order_N]
        hits_E = np.cumsum(times_N * self._y_N)[self._ends]
        false_E = np.cumsum(times_N * (1 - self._y_N))[self._ends]
        hits, false = hits_E[-1], false_E[-1]
        if not hits or not false:
            return float("nan"), float("nan")
        both_E = hits_E + false_E
        precision_E = np.divide(hits_E, both_E, out=np.zeros_like(hits_E), where=both_E > 0)
        gained_E = np.diff(hits_E, prepend=0.0) / hits
        ks = float(np.abs(hits_E / hits - false_E / false).max())
        return float(gained_E @ precision_E), ks


def _log(p_N: Floats, y_N: Floats) -> Floats:
    return -np.log(np.maximum(np.where(y_N == 1, p_N, 1 - p_N), _LEAST))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
