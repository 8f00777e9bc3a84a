"""Computes metrics of stored predictions with intervals, and the differences of two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vfl_common.config.task import LOWER_IS_BETTER
from vfl_lab.report.quality.kept import SplitPredictions
from vfl_party.base.statistics import (
    RESAMPLES,
    Floats,
    MetricInfluence,
    ScoreRanking,
    compute_auc,
    compute_c_index,
    compute_interval,
    compute_log_losses,
    compute_mean,
    ndcg,
    resample,
)

# Maximum number of rows of which all pairs are compared.
_MAX_PAIRED = 20_000
# Prefix of the name of a metric for the difference of two.
_GAIN = "gain of "
DELONG, BOOTSTRAP, INFLUENCE = "DeLong", "bootstrap", "influence of each row"
Statistic = Callable[[Floats], dict[str, float]]


@dataclass(frozen=True)
class Estimate:
    """A metric, or the difference of two, with its 95 % interval (NaN without one).

    ``how``: the method of the interval.
    """

    value: float
    low: float
    high: float
    how: str

    def better(self, metric: str) -> str:
        """Returns ``better`` or ``worse`` if the whole interval of a difference is."""
        low, high = (-self.high, -self.low) if metric in LOWER_IS_BETTER else (self.low, self.high)
        return "better" if low > 0 else "worse" if high < 0 else "no difference shown"


def estimate_metrics(
    predictions: SplitPredictions, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Returns the defined metrics of one split with their intervals."""
    return _estimate_from_influences(
        predictions, _compute_influences(predictions)
    ) | _estimate_by_bootstrap(predictions, _choose_statistic(predictions), resamples)


def estimate_gain(
    predictions: SplitPredictions, base: SplitPredictions, resamples: int = RESAMPLES
) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    """Returns the metrics of ``base``, and those of ``predictions`` minus them, with paired
    intervals; both have the same rows in the same order.
    """
    own, others = _compute_influences(predictions), _compute_influences(base)
    how = _choose_interval_method(predictions)
    gain = {}
    for name in own.keys() & others.keys():
        difference = own[name].minus(others[name])
        gain[name] = Estimate(difference.value, *difference.interval, how)
    one, other = _choose_statistic(predictions), _choose_statistic(base)

    def both(times_N: Floats) -> dict[str, float]:
        mine, theirs = one(times_N), other(times_N)
        gains = {f"{_GAIN}{name}": mine[name] - theirs[name] for name in mine}
        return theirs | gains

    estimates = _estimate_by_bootstrap(predictions, both, resamples)
    theirs = {name: estimate for name, estimate in estimates.items() if not name.startswith(_GAIN)}
    gain |= {
        name.removeprefix(_GAIN): estimate
        for name, estimate in estimates.items()
        if name.startswith(_GAIN)
    }
    return _estimate_from_influences(base, others) | theirs, gain


def estimate_differences(
    predictions: SplitPredictions, base: SplitPredictions, resamples: int = RESAMPLES
) -> dict[str, Estimate]:
    """Returns the metrics of ``predictions`` minus those of ``base``; see ``estimate_gain``."""
    return estimate_gain(predictions, base, resamples)[1]


def _choose_interval_method(predictions: SplitPredictions) -> str:
    return INFLUENCE if predictions.kind in ("multiclass", "survival") else DELONG


def _estimate_from_influences(
    predictions: SplitPredictions, spreads: Mapping[str, MetricInfluence]
) -> dict[str, Estimate]:
    estimates = {}
    for name, spread in spreads.items():
        low, high = spread.interval
        estimates[name] = Estimate(
            spread.value, max(0.0, low), min(1.0, high), _choose_interval_method(predictions)
        )
    return estimates


def _estimate_by_bootstrap(
    predictions: SplitPredictions, of: Statistic, resamples: int
) -> dict[str, Estimate]:
    rows = len(predictions)
    names = list(of(np.ones(rows)))
    if not names:
        return {}

    def vector(times_N: Floats) -> Floats:
        metrics = of(times_N)
        return np.array([metrics[name] for name in names])

    values_RT = resample(rows, vector, resamples)
    return {
        name: Estimate(float(values_RT[0, at]), *compute_interval(values_RT[1:, at]), BOOTSTRAP)
        for at, name in enumerate(names)
        if np.isfinite(values_RT[0, at])
    }


def _compute_influences(predictions: SplitPredictions) -> dict[str, MetricInfluence]:
    """Returns the metrics that compare pairs of rows, whose variance has a formula."""
    if predictions.kind == "binary" and 0 < predictions.truth_N.sum() < len(predictions):
        return {"auc": compute_auc(predictions.scores_N, predictions.is_positive_N)}
    if predictions.kind in ("multiclass", "multilabel"):
        truth_NC = predictions.truth_N
        if predictions.kind == "multiclass":
            truth_NC = truth_NC[:, None] == np.arange(len(predictions.classes))
        # A class is left out if no row, or every row, is of it.
        spreads = [
            compute_auc(scores_N, true_N)
            for scores_N, true_N in zip(predictions.scores_NO.T, truth_NC.T == 1, strict=True)
            if 0 < true_N.sum() < len(predictions)
        ]
        return {"auc": compute_mean(spreads)} if spreads else {}
    if (
        predictions.kind == "survival"
        and len(predictions) <= _MAX_PAIRED
        and predictions.more_N is not None
    ):
        spread = compute_c_index(predictions.truth_N, predictions.more_N, predictions.scores_N)
        return {} if spread is None else {"c_index": spread}
    return {}


def _choose_statistic(predictions: SplitPredictions) -> Statistic:
    """Returns a function that computes the other metrics from how often each row is drawn."""
    made: Mapping[str, Callable[[SplitPredictions], Statistic]] = {
        "binary": _binary,
        "multiclass": _multiclass,
        "multilabel": _multilabel,
        "regression": _regression,
        "ranking": _ranking,
    }
    return made[predictions.kind](predictions) if predictions.kind in made else lambda _times: {}


def _binary(predictions: SplitPredictions) -> Statistic:
    y_N, p_N = predictions.truth_N.astype(np.float64), predictions.scores_N
    assert predictions.decided_N is not None  # noqa: S101 - of classes
    d_N = predictions.decided_N.astype(np.float64)
    terms_NT = np.stack(
        [
            y_N == d_N,
            y_N * d_N,
            (1 - y_N) * d_N,
            y_N * (1 - d_N),
            (p_N - y_N) ** 2,
            compute_log_losses(np.where(y_N == 1, p_N, 1 - p_N)),
        ],
        axis=1,
    ).astype(np.float64)
    ranked = ScoreRanking(y_N, p_N)

    def of(times_N: Floats) -> dict[str, float]:
        accuracy, hits, false, missed, brier, log_loss = times_N @ terms_NT / times_N.sum()
        precision, ks = ranked.average_precision_and_ks(times_N)
        return {
            "average_precision": precision,
            "ks": ks,
            "accuracy": accuracy,
            "f1": _divide(2 * hits, 2 * hits + false + missed),
            "precision": _divide(hits, hits + false),
            "recall": _divide(hits, hits + missed),
            "brier": brier,
            "log_loss": log_loss,
        }

    return of


def _multiclass(predictions: SplitPredictions) -> Statistic:
    count, rows = len(predictions.classes), np.arange(len(predictions))
    assert predictions.decided_N is not None  # noqa: S101 - of classes
    cell_N = predictions.truth_N * count + predictions.decided_N
    is_NC = np.zeros(predictions.scores_NO.shape)
    is_NC[rows, predictions.truth_N] = 1
    p_N = predictions.scores_NO[rows, predictions.truth_N]
    terms_NT = np.stack(
        [((predictions.scores_NO - is_NC) ** 2).sum(axis=1), compute_log_losses(p_N)],
        axis=1,
    )

    def of(times_N: Floats) -> dict[str, float]:
        cells_CC = np.bincount(cell_N, times_N, count * count).reshape(count, count)
        hits_C, true_C, decided_C = np.diag(cells_CC), cells_CC.sum(axis=1), cells_CC.sum(axis=0)
        there_C = (true_C + decided_C) > 0
        f1_C = 2 * hits_C[there_C] / (true_C + decided_C)[there_C]
        brier, log_loss = times_N @ terms_NT / times_N.sum()
        return {
            "accuracy": float(hits_C.sum() / times_N.sum()),
            "f1": float(f1_C.mean()),
            "brier": float(brier),
            "log_loss": float(log_loss),
        }

    return of


def _multilabel(predictions: SplitPredictions) -> Statistic:
    y_NL, d_NL = (
        predictions.truth_N.astype(np.float64),
        (predictions.scores_NO > 0.5).astype(np.float64),
    )
    right_N = (y_NL == d_NL).mean(axis=1)
    brier_N = ((predictions.scores_NO - y_NL) ** 2).mean(axis=1)

    def of(times_N: Floats) -> dict[str, float]:
        hits_L = times_N @ (y_NL * d_NL)
        both_L = times_N @ (y_NL + d_NL)
        f1_L = np.divide(2 * hits_L, both_L, out=np.zeros_like(hits_L), where=both_L > 0)
        accuracy, brier = (float(times_N @ term_N / times_N.sum()) for term_N in (right_N, brier_N))
        return {"accuracy": accuracy, "f1": float(f1_L.mean()), "brier": brier}

    return of


def _regression(predictions: SplitPredictions) -> Statistic:
    y_N = predictions.truth_N.astype(np.float64)
    e_N = predictions.scores_N - y_N
    # Centred, because the squares of labels far from 0 lose the digits of their variance.
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


def _ranking(predictions: SplitPredictions) -> Statistic:
    """Returns NDCG over the queries with at least two rows and a relevant one; the rows of a query
    are drawn together.
    """
    assert predictions.more_N is not None  # noqa: S101 - of queries
    values: list[float] = []
    first_N = np.zeros(len(predictions), np.int64)
    _, query_N = np.unique(predictions.more_N, return_inverse=True)
    order = np.argsort(query_N, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(query_N[order])) + 1):
        if len(rows) > 1 and (predictions.truth_N[rows] > 0).any():
            first_N[rows[0]] = len(values) + 1
            values.append(ndcg(predictions.truth_N[rows], predictions.scores_N[rows]))
    if not values:
        return lambda _times: {}
    value_N = np.array([0.0, *values])[first_N]
    is_first_N = (first_N > 0).astype(np.float64)

    def of(times_N: Floats) -> dict[str, float]:
        queries = float(times_N @ is_first_N)
        return {"ndcg": float(times_N @ value_N) / queries if queries else float("nan")}

    return of


def _divide(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0
