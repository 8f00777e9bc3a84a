"""Metrics, intervals and curves of reports, against scikit-learn, scipy and definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from sklearn import calibration as sk_calibration
from sklearn import metrics as sk

from tests.harness.present import present
from tests.harness.reference_task import c_index_of
from vfl_common.config.task import LOWER_IS_BETTER, TaskSettings
from vfl_lab.production.compare import compute_measures
from vfl_lab.production.scored import ModelScores
from vfl_lab.report import quality
from vfl_lab.report.draw import compute_kaplan_meier
from vfl_lab.report.quality import SplitPredictions, estimate_differences, estimate_metrics
from vfl_party.base.statistics import compute_auc, compute_c_index
from vfl_party.models.metrics import evaluate

Floats = npt.NDArray[np.float64]
EXACT: dict[str, Any] = {"rel": 0, "abs": 1e-9}


def keys(rows: int) -> tuple[str, ...]:
    return tuple(f"r{row}" for row in range(rows))


def binary(
    seed: int = 0, rows: int = 300, ties: int | None = None, more: float = 0.0
) -> SplitPredictions:
    draw = np.random.default_rng(seed)
    y_N = (draw.random(rows) < 0.35).astype(np.int64)
    noise_N = np.random.default_rng(seed + 100).normal(0, 1.4 + more, rows)
    p_N = 1 / (1 + np.exp(-(2 * y_N - 1 + noise_N)))
    p_N = p_N if ties is None else p_N.round(ties)
    return SplitPredictions(
        "test", "binary", keys(rows), ("no", "yes"), y_N, p_N[:, None], (p_N > 0.5).astype(np.int64)
    )


def classes(seed: int = 0, rows: int = 200, count: int = 4) -> SplitPredictions:
    draw = np.random.default_rng(seed)
    y_N = draw.integers(0, count - 1, rows)
    logits = draw.normal(0, 1.0, (rows, count)) + 1.3 * np.eye(count)[y_N]
    p_NC = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    names = tuple(f"c{k}" for k in range(count))
    return SplitPredictions("test", "multiclass", keys(rows), names, y_N, p_NC, p_NC.argmax(axis=1))


def numbers(seed: int = 0, rows: int = 150, far: float = 1e6) -> SplitPredictions:
    draw = np.random.default_rng(seed)
    y_N = far + draw.normal(0, 3, rows)
    return SplitPredictions(
        "test", "regression", keys(rows), (), y_N, (y_N + draw.normal(0.3, 1, rows))[:, None]
    )


@pytest.mark.parametrize("ties", [None, 2, 1])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_two_classes_are_scikit_learn_s_and_scipy_s(seed: int, ties: int | None) -> None:
    kept = binary(seed, ties=ties)
    y_N, p_N, d_N = kept.truth_N, kept.scores_N, kept.decided_N
    found = {name: each.value for name, each in estimate_metrics(kept, 2).items()}
    wanted = {
        "auc": sk.roc_auc_score(y_N, p_N),
        "average_precision": sk.average_precision_score(y_N, p_N),
        "ks": stats.ks_2samp(p_N[y_N == 1], p_N[y_N == 0]).statistic,
        "accuracy": sk.accuracy_score(y_N, d_N),
        "f1": sk.f1_score(y_N, d_N),
        "precision": sk.precision_score(y_N, d_N),
        "recall": sk.recall_score(y_N, d_N),
        "brier": sk.brier_score_loss(y_N, p_N),
    }
    if p_N.min() > 0 and p_N.max() < 1:
        wanted["log_loss"] = sk.log_loss(y_N, p_N)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, **EXACT)


def test_a_run_its_page_and_a_comparison_have_the_same_log_loss_of_certain_wrong_rows() -> None:
    logits = torch.tensor([[1.0], [-60.0], [60.0], [0.5]])
    y_N, p_NO = np.array([1, 1, 0, 0]), logits.double().sigmoid().numpy()
    decided = np.array([1, 0, 1, 1])
    kept = SplitPredictions("test", "binary", keys(4), ("no", "yes"), y_N, p_NO, decided)
    chosen, true = (tuple(("no", "yes")[k] for k in of) for of in (decided, y_N))
    scores = ModelScores(keys(4), ("score_yes",), p_NO, chosen, true)
    compared = {each.metric: each.old for each in compute_measures(scores, scores)}
    task = TaskSettings(kind="binary", metrics=("log_loss",))
    of_run = evaluate(task, logits, torch.from_numpy(y_N)[:, None].float())
    of_page = estimate_metrics(kept, 2)
    for name in ("log_loss", "auc"):
        assert of_run[name] == pytest.approx(of_page[name].value, **EXACT)
        assert of_run[name] == pytest.approx(compared[name], **EXACT)
    assert of_run["log_loss"] > 2 * 34.5 / 4


def test_metrics_of_several_classes_are_scikit_learn_s() -> None:
    kept = classes()
    found = {name: each.value for name, each in estimate_metrics(kept, 2).items()}
    y_N, p_NC, d_N = kept.truth_N, kept.scores_NO, kept.decided_N
    # The last class has no row, so it has no curve.
    aucs = [sk.roc_auc_score(y_N == k, p_NC[:, k]) for k in range(3)]
    assert found == pytest.approx(
        {
            "auc": np.mean(aucs),
            "accuracy": sk.accuracy_score(y_N, d_N),
            "f1": sk.f1_score(y_N, d_N, average="macro"),
            "brier": ((p_NC - np.eye(4)[y_N]) ** 2).sum(axis=1).mean(),
            "log_loss": sk.log_loss(y_N, p_NC, labels=range(4)),
        },
        **EXACT,
    )


def test_metrics_of_several_labels_are_means_of_scikit_learn_s() -> None:
    parts = [binary(seed) for seed in range(3)]
    y_NL = np.stack([each.truth_N for each in parts], axis=1)
    p_NL = np.stack([each.scores_N for each in parts], axis=1)
    kept = SplitPredictions("test", "multilabel", keys(len(y_NL)), ("a", "b", "c"), y_NL, p_NL)
    found = {name: each.value for name, each in estimate_metrics(kept, 2).items()}
    assert found == pytest.approx(
        {
            "auc": sk.roc_auc_score(y_NL, p_NL, average="macro"),
            "accuracy": (y_NL == (p_NL > 0.5)).mean(),
            "f1": sk.f1_score(y_NL, p_NL > 0.5, average="macro"),
            "brier": ((p_NL - y_NL) ** 2).mean(),
        },
        **EXACT,
    )


def test_metrics_of_numbers_are_scikit_learn_s() -> None:
    kept = numbers(far=0.0)
    found = {name: each.value for name, each in estimate_metrics(kept, 2).items()}
    y_N, said_N = kept.truth_N, kept.scores_N
    assert found == pytest.approx(
        {
            "rmse": sk.root_mean_squared_error(y_N, said_N),
            "mae": sk.mean_absolute_error(y_N, said_N),
            "r2": sk.r2_score(y_N, said_N),
            "bias": (said_N - y_N).mean(),
        },
        **EXACT,
    )
    far = numbers()
    assert estimate_metrics(far, 2)["r2"].value == pytest.approx(
        sk.r2_score(far.truth_N, far.scores_N), rel=1e-9
    )


def test_queries_are_ordered_as_scikit_learn_says() -> None:
    draw = np.random.default_rng(3)
    queries = np.repeat([f"q{k}" for k in range(12)], 6)
    relevance_N, scores_N = (
        draw.integers(0, 3, 72).astype(np.float64),
        draw.normal(size=72).round(0),
    )
    # A query without a relevant row counts for nothing.
    relevance_N[:6] = 0
    kept = SplitPredictions(
        "test", "ranking", keys(72), (), relevance_N, scores_N[:, None], more_N=queries
    )
    each = [
        sk.ndcg_score([relevance_N[queries == q]], [scores_N[queries == q]])
        for q in dict.fromkeys(queries.tolist())
        if relevance_N[queries == q].any()
    ]
    found = estimate_metrics(kept, 400)["ndcg"]
    assert found.value == pytest.approx(np.mean(each), **EXACT)
    # The deviation of a mean of eleven queries.
    assert found.high - found.low == pytest.approx(4 * np.std(each) / np.sqrt(11), rel=0.4)


def test_the_interval_of_an_auc_is_delong_s() -> None:
    kept = binary(4, rows=80, ties=1)
    x_M, y_N = kept.scores_N[kept.is_positive_N], kept.scores_N[~kept.is_positive_N]
    psi_MN = (x_M[:, None] > y_N) + 0.5 * (x_M[:, None] == y_N)
    variance = np.var(psi_MN.mean(axis=1), ddof=1) / len(x_M)
    variance += np.var(psi_MN.mean(axis=0), ddof=1) / len(y_N)
    found = estimate_metrics(kept, 2)["auc"]
    z = stats.norm.ppf(0.975)
    assert (found.low, found.high) == pytest.approx(
        tuple(psi_MN.mean() + sign * z * np.sqrt(variance) for sign in (-1, 1)), **EXACT
    )


def test_an_auc_of_one_positive_row_has_no_interval() -> None:
    spread = compute_auc(np.array([0.9, 0.1, 0.2]), np.array([True, False, False]))
    assert spread.value == 1.0
    assert not np.isfinite(spread.interval).any()
    assert not np.isfinite(spread.minus(spread).interval).any()


@pytest.mark.parametrize(("positives", "covers"), [(2, False), (10, True), (30, True)])
def test_delong_s_interval_covers_from_ten_rows_of_a_class_on(
    positives: int, covers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 draws. Three standard errors are 0.03 at 88 %, and 0.046 at 63 %."""
    monkeypatch.setattr("vfl_party.base.statistics.MIN_CLASS_ROWS", 2)
    draw, is_positive_N = np.random.default_rng(0), np.arange(500) < positives
    true, held = stats.norm.cdf(1.4 / np.sqrt(2)), 0
    for _ in range(1_000):
        low, high = compute_auc(draw.normal(1.4 * is_positive_N, 1.0), is_positive_N).interval
        held += low <= true <= high
    assert bool(held > 840) is covers


@pytest.mark.parametrize(("positives", "few"), [(2, "no valid"), (9, "no valid"), (10, "narrow")])
def test_few_rows_of_a_class_have_no_interval_and_no_verdict(positives: int, few: str) -> None:
    kept = binary(1)
    for label_N in (np.arange(300) < positives, np.arange(300) >= positives):
        one = replace(kept, truth_N=label_N.astype(np.int64))
        other = replace(one, scores_NO=1 - one.scores_NO)
        found = [estimate_metrics(one, 50), estimate_differences(one, other, 50)]
        for name, estimate in ((n, e) for metrics in found for n, e in metrics.items()):
            assert np.isfinite(estimate.value), name
            assert np.isfinite([estimate.low, estimate.high]).all() == (positives >= 10), name
            assert (estimate.better(name) == "no verdict") == (positives < 10)
        said = one.describe_few_rows()
        assert said.startswith(f"Only {positives} of 300 rows are ")
        assert few in said
    assert replace(kept, truth_N=(np.arange(300) < 30).astype(int)).describe_few_rows() == ""
    several = SplitPredictions(
        "test", "multilabel", keys(300), ("a", "b"),
        np.stack([np.arange(300) < 100, np.arange(300) < positives], axis=1).astype(int),
        np.tile(kept.scores_NO, 2),
    )  # fmt: skip
    assert several.describe_few_rows().startswith(f"b: Only {positives} of 300 rows are positive.")
    assert np.isfinite(estimate_metrics(several, 2)["auc"].low) == (positives >= 10)


def test_survival_is_harrell_s_and_its_interval_that_of_a_jackknife() -> None:
    draw = np.random.default_rng(1)
    times_N = np.ceil(draw.exponential(20, 90))
    events_N, risks_N = (
        (draw.random(90) < 0.7).astype(float),
        draw.normal(size=90).round(1) - times_N / 20,
    )

    def c_of(rows: Any) -> float:
        found = present(compute_c_index(times_N[rows], events_N[rows], risks_N[rows]))
        return found.value

    whole = present(compute_c_index(times_N, events_N, risks_N))
    assert whole.value == pytest.approx(c_index_of(risks_N, times_N, events_N), **EXACT)
    left_out = np.array([c_of(np.delete(np.arange(90), row)) for row in range(90)])
    jackknife = 89 / 90 * ((left_out - left_out.mean()) ** 2).sum()
    assert (whole.psi_N**2).sum() == pytest.approx(jackknife, rel=0.1)
    assert compute_c_index(times_N, np.zeros(90), risks_N) is None


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    kept = binary(2, rows=2_000)
    found = estimate_metrics(kept)["accuracy"]
    half = 1.96 * np.sqrt(found.value * (1 - found.value) / 2_000)
    assert (found.low, found.high) == pytest.approx(
        (found.value - half, found.value + half), abs=0.1 * half
    )


def test_the_bootstrap_of_average_precision_is_scipy_s() -> None:
    kept = binary(5, rows=150)
    found = estimate_metrics(kept)["average_precision"]
    scipy_s = stats.bootstrap(
        (kept.truth_N, kept.scores_N),
        sk.average_precision_score,
        paired=True,
        vectorized=False,
        n_resamples=400,
        method="percentile",
        rng=np.random.default_rng(7),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((scipy_s.low, scipy_s.high), abs=0.02)


def test_a_difference_is_paired_and_says_what_is_better() -> None:
    good, bad = binary(0), binary(0, more=3.0)
    both = present(good.pair_with(bad))
    found = estimate_differences(*both, 300)
    each = [estimate_metrics(one, 2) for one in both]
    for name, gain in found.items():
        assert gain.value == pytest.approx(each[0][name].value - each[1][name].value, **EXACT)
        assert gain.low <= gain.value <= gain.high
    assert {found[name].better(name) for name in ("auc", "brier", "log_loss", "ks")} == {"better"}
    assert found["brier"].value < 0 < found["auc"].value
    assert "brier" in LOWER_IS_BETTER
    back = estimate_differences(both[1], both[0], 300)
    assert {back[name].better(name) for name in ("auc", "brier", "log_loss")} == {"worse"}
    same = estimate_differences(good, good, 50)["auc"]
    assert (same.value, same.low, same.high, same.better("auc")) == (0, 0, 0, "no difference shown")


def test_only_rows_that_both_have_are_compared() -> None:
    first = binary(0, rows=50)
    second = binary(0, rows=50).take([40, 3, 20])
    both = present(first.pair_with(second))
    assert both[0].keys == both[1].keys == ("r3", "r20", "r40")
    assert first.pair_with(binary(0).take([60, 61])) is None
    assert first.pair_with(classes()) is None


@pytest.mark.parametrize("ties", [None, 1])
def test_curves_are_scikit_learn_s(ties: int | None) -> None:
    kept = binary(6, ties=ties)
    y_N, p_N = kept.is_positive_N, kept.scores_N
    false_T, true_T, _ = sk.roc_curve(y_N, p_N)
    np.testing.assert_allclose(quality.compute_roc(y_N, p_N), (false_T, true_T), rtol=0, atol=1e-9)
    precision_T, recall_T, _ = sk.precision_recall_curve(y_N, p_N)
    np.testing.assert_allclose(
        quality.compute_precision_recall(y_N, p_N), (precision_T, recall_T), rtol=0, atol=1e-9
    )
    found = quality.compute_calibration(y_N, p_N)
    true_B, said_B = sk_calibration.calibration_curve(y_N, p_N, n_bins=10, strategy="quantile")
    np.testing.assert_allclose(
        (found.true_B, found.predicted_B), (true_B, said_B), rtol=0, atol=1e-9
    )
    assert found.rows_B.sum() == len(kept)
    for hits, rows, low, high in zip(
        found.true_B * found.rows_B, found.rows_B, found.low_B, found.high_B, strict=True
    ):
        wilson = stats.binomtest(round(hits), int(rows)).proportion_ci(method="wilson")
        assert (low, high) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_tenths_are_of_the_highest_scores_first() -> None:
    kept = binary(8, rows=95)
    found = quality.divide_into_tenths(kept.is_positive_N, kept.scores_N)
    assert [each.rows for each in found] == [10] * 5 + [9] * 5
    assert sum(each.hits for each in found) == kept.truth_N.sum()
    assert (found[-1].gain, found[-1].lift) == pytest.approx((1.0, 1.0))
    first = np.argsort(-kept.scores_N)[:10]
    assert found[0].rate == pytest.approx(kept.truth_N[first].mean())
    assert found[0].lift == pytest.approx(kept.truth_N[first].mean() / kept.truth_N.mean())


def test_decisions_are_a_confusion_matrix() -> None:
    kept = binary(9)
    for threshold in (None, 0.2, 0.8):
        found = quality.count_decisions(kept, threshold)
        said_N = kept.decided_N if threshold is None else kept.scores_N > threshold
        (left, false), (missed, hits) = sk.confusion_matrix(kept.truth_N, said_N)
        assert (found.left, found.false, found.missed, found.hits) == (left, false, missed, hits)
        assert found.f1 == pytest.approx(sk.f1_score(kept.truth_N, said_N), **EXACT)
    several = classes()
    np.testing.assert_array_equal(
        quality.count_confusions(several),
        sk.confusion_matrix(several.truth_N, several.decided_N, labels=range(4)),
    )


def test_survivors_are_kaplan_and_meier_s() -> None:
    draw = np.random.default_rng(2)
    times_N, events_N = np.ceil(draw.exponential(9, 60)), (draw.random(60) < 0.6).astype(float)
    times, alive = compute_kaplan_meier(times_N, events_N)
    data = stats.CensoredData(times_N[events_N == 1], right=times_N[events_N == 0])
    scipy_s = stats.ecdf(data).sf
    np.testing.assert_allclose(alive[1:], scipy_s.evaluate(times[1:]), rtol=0, atol=1e-9)


def test_a_curve_is_thinned_to_what_a_picture_shows() -> None:
    x, y = quality.thin_out(np.linspace(0, 1, 27_000), np.arange(27_000.0))
    assert len(x) == len(y) <= 240
    assert (x[0], x[-1], y[-1]) == (0.0, 1.0, 26_999.0)
