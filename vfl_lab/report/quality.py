"""Computes metrics of stored predictions with intervals, and the differences of two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from vfl_common.config.task import LOWER_IS_BETTER, Kind, class_text
from vfl_common.errors import Code, InputError
from vfl_party.base.statistics import (
    MIN_CLASS_ROWS,
    RESAMPLES,
    Floats,
    MetricInfluence,
    ScoreRanking,
    Z,
    compute_auc,
    compute_c_index,
    compute_interval,
    compute_log_losses,
    compute_mean,
    describe_few_rows,
    ndcg,
    resample,
)
from vfl_party.data.id_rules import SEPARATOR
from vfl_party.predict.results import KEPT

# Maximum number of points of a curve in a picture; more are not visible.
_MAX_POINTS = 240


# Number of groups of rows by score.
TENTHS = 10


# ROC, precision and recall, calibration, gain and lift.
@dataclass(frozen=True)
class Calibration:
    """The calibration of groups of rows with similar scores, [B] each.

    ``predicted_B``: the mean score; ``true_B``: the share of positive rows, with Wilson's interval
    ``low_B``, ``high_B``; ``rows_B``: the number of rows.
    """

    predicted_B: Floats  # noqa: N815 - the shape is part of the name
    true_B: Floats  # noqa: N815
    low_B: Floats  # noqa: N815
    high_B: Floats  # noqa: N815
    rows_B: npt.NDArray[np.int64]  # noqa: N815


@dataclass(frozen=True)
class Tenth:
    """A tenth of the rows by score.

    ``hits``: the number of positive rows. ``min_score``: the lowest score. ``gain``: the share of
    all positive rows in this and higher tenths. ``lift``: the share of positive rows in these
    tenths, divided by that in all rows.
    """

    rows: int
    hits: int
    min_score: float
    gain: float
    lift: float

    @property
    def rate(self) -> float:
        """The share of positive rows."""
        return self.hits / self.rows if self.rows else float("nan")


@dataclass(frozen=True)
class Decisions:
    """The decisions of a threshold on rows of two classes.

    ``hits``: true positives; ``false``: false positives; ``missed``: false negatives; ``left``:
    true negatives.
    """

    threshold: float
    hits: int
    false: int
    missed: int
    left: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.hits + self.false + self.missed + self.left

    @property
    def chosen(self) -> int:
        """The number of rows above the threshold."""
        return self.hits + self.false

    @property
    def precision(self) -> float:
        """The share of the chosen rows that are positive; NaN if none is chosen."""
        return self.hits / self.chosen if self.chosen else float("nan")

    @property
    def recall(self) -> float:
        """The share of the positive rows that are chosen; NaN without positive rows."""
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else float("nan")

    @property
    def accuracy(self) -> float:
        """The share of right decisions."""
        return (self.hits + self.left) / self.rows

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 if undefined."""
        whole = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / whole if whole else 0.0


def compute_roc(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> tuple[Floats, Floats]:
    """Returns the false and the true positive rates, [T] each, from (0, 0) to (1, 1).

    Args:
        is_positive_N: whether each row is positive, [N]; both classes occur.
        scores_N: the scores, [N].
    """
    from sklearn.metrics import roc_curve

    false_T, true_T, _ = roc_curve(is_positive_N, scores_N)
    return false_T, true_T


def compute_precision_recall(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats
) -> tuple[Floats, Floats]:
    """Returns precision and recall, [T] each, from the lowest threshold to the highest.

    Args:
        is_positive_N: whether each row is positive, [N]; both classes occur.
        scores_N: the scores, [N].
    """
    from sklearn.metrics import precision_recall_curve

    precision_T, recall_T, _ = precision_recall_curve(is_positive_N, scores_N)
    return precision_T, recall_T


def compute_calibration(
    is_positive_N: npt.NDArray[np.bool_], scores_N: Floats, groups: int = TENTHS
) -> Calibration:
    """Divides the rows into groups of equal size by score, and compares scores with labels.

    Args:
        is_positive_N: whether each row is positive, [N].
        scores_N: the predicted probabilities, [N].
        groups: the number of groups.
    """
    from sklearn.calibration import calibration_curve

    true_B, predicted_B = calibration_curve(
        is_positive_N, scores_N, n_bins=groups, strategy="quantile"
    )
    edges = np.percentile(scores_N, np.linspace(0, 1, groups + 1) * 100)
    counts = np.bincount(np.searchsorted(edges[1:-1], scores_N), minlength=groups)
    rows_B = counts[counts > 0]
    middle_B = (true_B + Z**2 / (2 * rows_B)) / (1 + Z**2 / rows_B)
    half_B = np.sqrt(true_B * (1 - true_B) / rows_B + Z**2 / (4 * rows_B**2))
    half_B = Z * half_B / (1 + Z**2 / rows_B)
    return Calibration(predicted_B, true_B, middle_B - half_B, middle_B + half_B, rows_B)


def divide_into_tenths(is_positive_N: npt.NDArray[np.bool_], scores_N: Floats) -> list[Tenth]:
    """Divides the rows into tenths, the highest scores first.

    Args:
        is_positive_N: whether each row is positive, [N].
        scores_N: the scores, [N].
    """
    order_N = np.argsort(-scores_N, kind="stable")
    all_hits, rows, groups_ = int(is_positive_N.sum()), 0, []
    hits = 0
    for part in np.array_split(order_N, min(TENTHS, len(order_N))):
        own = int(is_positive_N[part].sum())
        rows, hits = rows + len(part), hits + own
        gain = hits / all_hits if all_hits else float("nan")
        lift = gain / (rows / len(order_N))
        groups_.append(Tenth(len(part), own, float(scores_N[part].min()), gain, lift))
    return groups_


def count_decisions(predictions: SplitPredictions, threshold: float | None) -> Decisions:
    """Counts the decisions of a threshold; None: those of the model."""
    decided_N = (
        predictions.scores_N > threshold if threshold is not None else predictions.decided_N == 1
    )
    true_N = predictions.is_positive_N
    counts = (true_N & decided_N, ~true_N & decided_N, true_N & ~decided_N, ~true_N & ~decided_N)
    hits, false, missed, left = (int(count.sum()) for count in counts)
    return Decisions(0.5 if threshold is None else threshold, hits, false, missed, left)


def count_confusions(predictions: SplitPredictions) -> npt.NDArray[np.int64]:
    """Counts rows by true class (first axis) and decided class, [C, C]."""
    count = len(predictions.classes)
    assert predictions.decided_N is not None  # noqa: S101 - of classes
    cells = np.bincount(
        predictions.truth_N * count + predictions.decided_N, minlength=count * count
    )
    return cells.reshape(count, count)


def thin_out(*arrays: Floats) -> list[Floats]:
    """Returns a subset of the points of a curve for a picture, with the first and the last.

    Args:
        arrays: coordinates of the points, [N] each.
    """
    count = len(arrays[0])
    if count <= _MAX_POINTS:
        return list(arrays)
    at = np.unique(np.linspace(0, count - 1, _MAX_POINTS).round().astype(np.int64))
    return [array[at] for array in arrays]


_SCORE, _MATCHED, _TRUTH = "score_", "matched_", "truth_"


@dataclass(frozen=True)
class SplitPredictions:
    """Rows of one split with their truth and scores.

    ``keys``: their aligned ids. ``classes``: the negative and the positive class (binary), all
    classes (multiclass), the labels (multilabel), otherwise none. ``truth_N``: 0 or 1 (binary), the
    index of the class (multiclass), [N, L] (multilabel), the label (regression, ranking), the time
    (survival). ``scores_NO``: the probability of the positive class (binary, O = 1), of each class
    or label, or the predicted value. ``decided_N``: the decision of the model, like ``truth_N``;
    None without classes. ``more_N``: the event (survival), or the query (ranking).
    """

    split: str
    kind: Kind
    keys: tuple[str, ...]
    classes: tuple[str, ...]
    truth_N: npt.NDArray[Any]  # noqa: N815 - the shape is part of the name
    scores_NO: Floats  # noqa: N815
    decided_N: npt.NDArray[np.int64] | None = None  # noqa: N815
    more_N: npt.NDArray[Any] | None = None  # noqa: N815

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def scores_N(self) -> Floats:  # noqa: N802 - the shape is part of the name
        """The only score of each row, [N]."""
        return self.scores_NO[:, 0]

    @property
    def is_positive_N(self) -> npt.NDArray[np.bool_]:  # noqa: N802
        """Whether each row is of the positive class, [N]."""
        return np.asarray(self.truth_N == 1)

    @property
    def smaller_class(self) -> int:
        """The number of rows of the smaller of two classes."""
        positives = int(self.is_positive_N.sum())
        return min(positives, len(self) - positives)

    def describe_few_rows(self) -> str:
        """Returns sentences about too few rows of the smaller of two classes, of any label; ''
        if there are enough.
        """
        if self.kind == "binary":
            return describe_few_rows(int(self.is_positive_N.sum()), len(self))
        if self.kind != "multilabel":
            return ""
        # A label without rows, or with all rows, has no AUC.
        counts = {
            n: int(count) for n, count in zip(self.classes, self.truth_N.sum(axis=0), strict=True)
        }
        counts = {name: count for name, count in counts.items() if 0 < count < len(self)}
        name = min(counts, key=lambda n: min(counts[n], len(self) - counts[n]), default="")
        few = describe_few_rows(counts[name], len(self)) if name else ""
        return f"{name}: {few}" if few else ""

    def take(self, rows: Sequence[int]) -> SplitPredictions:
        """Returns the rows at some positions."""
        at = np.asarray(rows, np.int64)
        return replace(
            self,
            keys=tuple(self.keys[row] for row in rows),
            truth_N=self.truth_N[at],
            scores_NO=self.scores_NO[at],
            decided_N=None if self.decided_N is None else self.decided_N[at],
            more_N=None if self.more_N is None else self.more_N[at],
        )

    def pair_with(
        self, other: SplitPredictions
    ) -> tuple[SplitPredictions, SplitPredictions] | None:
        """Returns the rows that both have, in the same order; None if there are fewer than two, or
        if the tasks differ.
        """
        if (self.kind, self.classes) != (other.kind, other.classes):
            return None
        at = {key: row for row, key in enumerate(other.keys)}
        pairs = [(row, at[key]) for row, key in enumerate(self.keys) if key in at]
        if len(pairs) < 2:
            return None
        return self.take([a for a, _ in pairs]), other.take([b for _, b in pairs])


def read_kept(folder: Path, kind: Kind) -> dict[str, SplitPredictions]:
    """Reads the predictions in a party's folder: {split: its rows}; empty without predictions.

    If two phases have measured a split, the later one counts, as in the summary. Raises InputError
    if the file is damaged.
    """
    path = folder / KEPT
    try:
        table = pyarrow.parquet.read_table(path)
    except FileNotFoundError:
        return {}
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error}). Remove it, or train again."
        ) from None
    try:
        phases, splits = (np.array(table.column(n).to_pylist()) for n in ("phase", "split"))
        by_split = {}
        for split in dict.fromkeys(splits.tolist()):
            last = phases[splits == split][-1]
            rows = table.filter(pa.array((splits == split) & (phases == last)))
            by_split[split] = _read_split(rows, split, kind)
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has another format than this version writes ({type(error).__name__}). Remove "
            "it, or train again.",
        ) from None
    return by_split


def _read_split(table: pa.Table, split: str, kind: Kind) -> SplitPredictions:
    ids = [name for name in table.column_names if name.startswith(_MATCHED)]
    cells = [table.column(name).to_pylist() for name in ids]
    keys = tuple(SEPARATOR.join(map(str, row)) for row in zip(*cells, strict=True))
    if kind in ("binary", "multiclass"):
        return _read_classes(table, split, kind, keys)
    if kind == "multilabel":
        names = [n.removeprefix(_SCORE) for n in table.column_names if n.startswith(_SCORE)]
        truth_NL = np.stack([_read_numbers(table, f"{_TRUTH}{n}") for n in names], axis=1).astype(
            int
        )
        scores_NL = np.stack([_read_numbers(table, f"{_SCORE}{n}") for n in names], axis=1)
        return SplitPredictions(split, kind, keys, tuple(names), truth_NL, scores_NL)
    name = {"regression": "value", "survival": "risk", "ranking": "score"}[kind]
    more_N: npt.NDArray[Any] | None = None
    if kind == "survival":
        more_N = _read_numbers(table, "event")
    elif kind == "ranking":
        more_N = np.array(list(map(str, table.column("group").to_pylist())))
    truth_N, scores_NO = _read_numbers(table, "truth"), _read_numbers(table, name)[:, None]
    return SplitPredictions(split, kind, keys, (), truth_N, scores_NO, more_N=more_N)


def _read_classes(
    table: pa.Table, split: str, kind: Kind, keys: tuple[str, ...]
) -> SplitPredictions:
    names = [n.removeprefix(_SCORE) for n in table.column_names if n.startswith(_SCORE)]
    scores_NO = np.stack([_read_numbers(table, f"{_SCORE}{n}") for n in names], axis=1)
    truth, chosen = (
        [class_text(cell) for cell in table.column(name).to_pylist()] for name in ("truth", "class")
    )
    if kind == "binary":
        positive = names[0]
        others = sorted({*truth, *chosen} - {positive})
        classes = (others[0] if others else f"not {positive}", positive)
        at = {class_name: int(class_name == positive) for class_name in {*truth, *chosen}}
    else:
        classes = tuple(names)
        at = {name: place for place, name in enumerate(names)}
    truth_N, decided_N = (np.array([at[value] for value in of], np.int64) for of in (truth, chosen))
    return SplitPredictions(split, kind, keys, classes, truth_N, scores_NO, decided_N)


def _read_numbers(table: pa.Table, name: str) -> Floats:
    return np.asarray(table.column(name).to_numpy(), np.float64)


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
        """Returns ``better`` or ``worse`` if the whole interval of a difference is, and ``no
        verdict`` without an interval.
        """
        if self.low != self.low:
            return "no verdict"
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
        low, high = np.clip(spread.interval, 0.0, 1.0).tolist()
        estimates[name] = Estimate(spread.value, low, high, _choose_interval_method(predictions))
    return estimates


def _estimate_by_bootstrap(
    predictions: SplitPredictions, of: Statistic, resamples: int
) -> dict[str, Estimate]:
    rows = len(predictions)
    values = of(np.ones(rows))
    names = list(values)
    if not names:
        return {}
    if predictions.kind == "binary" and predictions.smaller_class < MIN_CLASS_ROWS:
        nan = float("nan")
        return {n: Estimate(v, nan, nan, BOOTSTRAP) for n, v in values.items() if np.isfinite(v)}

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
