"""Metrics against scikit-learn, and what torchmetrics must not bring in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from tests.harness.present import present
from tests.harness.reference_task import c_index_of, losses_of_rows, ndcg_of, threshold_of
from vfl_common.config.task import METRICS, TaskSettings, ThresholdRule
from vfl_party.models import losses
from vfl_party.models.losses import loss_fn, scores
from vfl_party.models.metrics import choose_threshold, decide, evaluate, lower_is_better

BINARY, REGRESSION = TaskSettings(kind="binary"), TaskSettings(kind="regression")
FIVE = TaskSettings(kind="multiclass", classes=5)
GENERATOR = torch.Generator().manual_seed(7)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


# At 60 probabilities saturate, and would tie.
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_binary_metrics_are_those_of_scikit_learn(scale: float) -> None:
    outputs_N1 = randn(400, 1) * scale
    targets_N1 = (outputs_N1 + scale * randn(400, 1) > 0.3).float()
    got = evaluate(BINARY, outputs_N1, targets_N1)
    x, y = outputs_N1.flatten().double().numpy(), targets_N1.flatten().numpy()
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(y, x > 0))
    assert got["f1"] == pytest.approx(sk.f1_score(y, x > 0))
    assert got["auc"] == pytest.approx(sk.roc_auc_score(y, x), abs=1e-6)
    assert got["loss"] == pytest.approx(np.mean(np.logaddexp(0, x) - x * y))


def test_logits_within_zero_and_one_are_not_taken_for_probabilities() -> None:
    got = evaluate(BINARY, torch.tensor([[0.2], [0.4], [0.9]]), torch.tensor([[1.0], [1.0], [1.0]]))
    # Logits above zero, all of them.
    assert got["accuracy"] == 1.0
    assert "auc" not in got


def test_multiclass_metrics_are_those_of_scikit_learn() -> None:
    targets_N = torch.randint(5, (500,), generator=GENERATOR)
    outputs_NC = randn(500, 5) + 1.5 * torch.nn.functional.one_hot(targets_N, 5)
    got = evaluate(FIVE, outputs_NC, targets_N)
    p, y = outputs_NC.double().softmax(1).numpy(), targets_N.numpy()
    assert got["accuracy"] == pytest.approx(sk.accuracy_score(y, p.argmax(1)))
    assert got["f1"] == pytest.approx(sk.f1_score(y, p.argmax(1), average="macro"))
    assert got["auc"] == pytest.approx(sk.roc_auc_score(y, p, multi_class="ovr"), abs=1e-6)
    assert got["loss"] == pytest.approx(sk.log_loss(y, p))


def test_classes_that_do_not_occur_are_left_out_of_macro_averages() -> None:
    targets_N = torch.randint(3, (200,), generator=GENERATOR)
    outputs_NC = randn(200, 5)
    # Neither occurs nor is predicted.
    outputs_NC[:, 4] -= 100
    got = evaluate(FIVE, outputs_NC, targets_N)
    p, y = outputs_NC.double().softmax(1).numpy(), targets_N.numpy()
    assert got["auc"] == pytest.approx(
        np.mean([sk.roc_auc_score(y == k, p[:, k]) for k in range(3)]), abs=1e-6
    )
    assert got["f1"] == pytest.approx(sk.f1_score(y, p.argmax(1), average="macro"))
    assert "auc" not in evaluate(FIVE, outputs_NC, torch.zeros_like(targets_N))


def test_regression_metrics_are_in_both_scales() -> None:
    outputs_N1, targets_N1 = randn(100, 1), randn(100, 1)
    got = evaluate(REGRESSION, outputs_N1, targets_N1, lambda v: v * 50 + 7)
    expected = sk.root_mean_squared_error(targets_N1.numpy(), outputs_N1.numpy())
    assert got == pytest.approx(
        {"loss": expected**2, "rmse": 50 * expected, "rmse_scaled": expected}
    )
    same = evaluate(REGRESSION, outputs_N1, targets_N1)
    assert same["rmse"] == same["rmse_scaled"] == pytest.approx(expected)


def test_no_rows_give_no_metrics() -> None:
    assert evaluate(BINARY, torch.zeros(0, 1), torch.zeros(0, 1)) == {}


@pytest.mark.parametrize(
    ("task", "outputs", "targets"),
    [
        (BINARY, randn(8, 1), torch.ones(8, 1)),
        (FIVE, randn(8, 5), torch.arange(8) % 5),
        (REGRESSION, randn(8, 1), randn(8, 1)),
    ],
)
def test_losses_are_means_with_a_gradient_and_scores_keep_the_shape(
    task: TaskSettings, outputs: torch.Tensor, targets: torch.Tensor
) -> None:
    leaf = outputs.clone().requires_grad_()
    loss = loss_fn(task)(leaf, targets)
    assert loss.shape == ()
    loss.backward()
    assert leaf.grad is not None
    each = torch.stack([loss_fn(task)(outputs[i : i + 1], targets[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(loss.detach(), each.mean())
    assert scores(task, outputs).shape == outputs.shape


def test_scores_are_probabilities_or_values() -> None:
    x = randn(6, 5)
    torch.testing.assert_close(scores(FIVE, x).sum(dim=1), torch.ones(6))
    torch.testing.assert_close(scores(BINARY, x[:, :1]), 1 / (1 + torch.exp(-x[:, :1])))
    assert torch.equal(scores(REGRESSION, x[:, :1]), x[:, :1])


@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_more_binary_metrics_are_those_of_scikit_learn(scale: float) -> None:
    names = ("average_precision", "brier", "gini", "ks", "log_loss", "precision", "recall")
    task = TaskSettings(kind="binary", metrics=names)
    outputs_N1 = randn(400, 1) * scale
    targets_N1 = (outputs_N1 + scale * randn(400, 1) > 0.7).float()
    got = evaluate(task, outputs_N1, targets_N1, threshold=0.8)
    x, y = outputs_N1.flatten().double(), targets_N1.flatten().numpy()
    p, guess = x.sigmoid().numpy(), (x.sigmoid() > 0.8).numpy()
    false, true, _ = sk.roc_curve(y, x)
    want = {
        "average_precision": sk.average_precision_score(y, x),
        "brier": sk.brier_score_loss(y, p),
        "gini": 2 * sk.roc_auc_score(y, x) - 1,
        "ks": (true - false).max(),
        # A row adds at most as much as one with a probability of 1e-15.
        "log_loss": np.minimum(np.logaddexp(0, x.numpy()) - x.numpy() * y, 15 * np.log(10)).mean(),
        "precision": sk.precision_score(y, guess),
        "recall": sk.recall_score(y, guess),
        "accuracy": sk.accuracy_score(y, guess),
        "f1": sk.f1_score(y, guess),
    }
    assert {name: got[name] for name in want} == pytest.approx(want, abs=2e-6)
    one = evaluate(task, outputs_N1, torch.ones_like(targets_N1))
    assert {"auc", "gini", "ks", "average_precision"}.isdisjoint(one)


def test_more_multiclass_metrics_are_those_of_scikit_learn() -> None:
    names = ("brier", "log_loss", "precision", "recall", "top_2", "top_9")
    task = TaskSettings(kind="multiclass", classes=5, metrics=names)
    targets_N = torch.randint(5, (500,), generator=GENERATOR)
    outputs_NC = randn(500, 5) + 1.5 * torch.nn.functional.one_hot(targets_N, 5)
    got = evaluate(task, outputs_NC, targets_N)
    p, y = outputs_NC.double().softmax(1).numpy(), targets_N.numpy()
    want = {
        "brier": ((p - np.eye(5)[y]) ** 2).sum(1).mean(),
        "log_loss": sk.log_loss(y, p),
        "precision": sk.precision_score(y, p.argmax(1), average="macro"),
        "recall": sk.recall_score(y, p.argmax(1), average="macro"),
        "top_2": sk.top_k_accuracy_score(y, p, k=2),
        "top_9": 1.0,
    }
    assert {name: got[name] for name in want} == pytest.approx(want, abs=2e-6)


def test_more_metrics_of_numbers_are_those_of_scikit_learn_in_the_unit_of_the_label() -> None:
    task = TaskSettings(kind="regression", metrics=("r2", "mae", "mape"))
    outputs_N1, targets_N1 = randn(100, 1), randn(100, 1)

    def unscale(v: torch.Tensor) -> torch.Tensor:
        return v * 5 + 70

    got = evaluate(task, outputs_N1, targets_N1, unscale)
    x, y = unscale(outputs_N1.double()).numpy(), unscale(targets_N1.double()).numpy()
    want = {
        "r2": sk.r2_score(y, x),
        "mae": sk.mean_absolute_error(y, x),
        "mape": sk.mean_absolute_percentage_error(y, x),
    }
    assert {name: got[name] for name in want} == pytest.approx(want)
    undefined = evaluate(task, outputs_N1, torch.zeros_like(targets_N1))
    assert {"r2", "mape"}.isdisjoint(undefined)


@pytest.mark.parametrize(("mean", "scale"), [(1.7e9, 60.0), (1e8, 1.0), (1e9, 1e-3), (-1e10, 1.0)])
def test_r2_of_numbers_far_from_zero_is_that_of_scikit_learn(mean: float, scale: float) -> None:
    targets_N1 = randn(400, 1).double()
    outputs_N1 = targets_N1 + 0.5 * randn(400, 1)

    def unscale(v: torch.Tensor) -> torch.Tensor:
        return v * scale + mean

    task = TaskSettings(kind="regression", metrics=("r2",))
    want = sk.r2_score(unscale(targets_N1).numpy(), unscale(outputs_N1).numpy())
    assert evaluate(task, outputs_N1, targets_N1, unscale)["r2"] == pytest.approx(want, rel=1e-9)


def test_counts_are_measured_by_their_rates() -> None:
    task = TaskSettings.model_validate({"kind": "regression", "loss": "poisson"})
    outputs_N1, targets_N1 = randn(100, 1), torch.randint(5, (100, 1), generator=GENERATOR).float()
    got = evaluate(task, outputs_N1, targets_N1, lambda v: 2 * v)
    rates = outputs_N1.double().exp().numpy()
    want = sk.root_mean_squared_error(targets_N1.numpy(), rates)
    assert (got["rmse_scaled"], got["rmse"]) == pytest.approx((want, 2 * want))
    assert torch.equal(scores(task, outputs_N1), outputs_N1.exp())


def test_metrics_of_several_labels_are_the_means_of_the_labels() -> None:
    task = TaskSettings(kind="multilabel", classes=3, metrics=("ks", "recall"))
    one = TaskSettings(kind="binary", metrics=("ks", "recall"))
    outputs_NL, targets_NL = randn(80, 3), (randn(80, 3) > 0.5).float()
    # Its AUC is undefined.
    targets_NL[:, 2] = 0.0
    got = evaluate(task, outputs_NL, targets_NL)
    each = [evaluate(one, outputs_NL[:, [k]], targets_NL[:, [k]]) for k in range(3)]
    for name in ("loss", "accuracy", "f1", "recall"):
        assert got[name] == pytest.approx(np.mean([of[name] for of in each]), abs=1e-6)
    for name in ("auc", "ks"):
        assert got[name] == pytest.approx(np.mean([of[name] for of in each[:2]]), abs=1e-6)
    assert torch.equal(scores(task, outputs_NL), outputs_NL.sigmoid())


def test_a_metric_is_best_for_the_right_outputs() -> None:
    """Every metric that a recipe can name is computed for each of its kinds, and its direction is right."""
    classes_N = torch.tensor([0, 1, 2, 0, 1, 2])
    bits_NL = torch.nn.functional.one_hot(classes_N, 3).float()
    numbers_N1 = torch.arange(1.0, 7.0)[:, None]
    cases = {
        "binary": ({}, bits_NL[:, :1], 18 * bits_NL[:, :1] - 9),
        "multilabel": ({"classes": 3}, bits_NL, 18 * bits_NL - 9),
        "multiclass": ({"classes": 3}, classes_N, 9 * bits_NL),
        "regression": ({}, numbers_N1, numbers_N1),
    }
    for name, kind in ((name, kind) for name, kinds in METRICS.items() for kind in kinds):
        settings, targets, right = cases[kind]
        task = TaskSettings.model_validate({"kind": kind, "metrics": [name]} | settings)
        wrong = right[[1, 0, 2, 3, 4, 5]]
        best, worse = (evaluate(task, outputs, targets)[name] for outputs in (right, wrong))
        assert best != worse, name
        assert (best < worse) == lower_is_better(task, name), f"{name}: see LOWER_IS_BETTER"


@pytest.mark.parametrize("kind", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_focal_loss_and_its_gradient_are_finite_where_probabilities_end(
    kind: str, gamma: float
) -> None:
    table = {"kind": kind, "loss": {"kind": "focal", "gamma": gamma}}
    task = TaskSettings.model_validate(table | ({} if kind == "binary" else {"classes": 3}))
    outputs = torch.tensor([[200.0] * task.outputs, [-200.0] * task.outputs])
    outputs[:, 0] *= -1
    outputs.requires_grad_()
    targets = torch.tensor([0, 1]) if kind == "multiclass" else torch.ones(2, task.outputs)
    loss_fn(task)(outputs, targets).backward()
    assert torch.isfinite(present(outputs.grad)).all()
    near = randn(9, task.outputs)
    targets = torch.arange(9) % 3 if kind == "multiclass" else (randn(9, task.outputs) > 0).float()
    want = losses_of_rows(task, near.double(), targets)
    torch.testing.assert_close(loss_fn(task)(near, targets), want.mean().float())
    weights = torch.rand(9, generator=GENERATOR)
    found = loss_fn(task)(near, targets, weights)
    torch.testing.assert_close(found, (want * weights).mean().float())


RULES = (
    {"rule": "f1"},
    {"rule": "rate", "rate": 0.2},
    {"rule": "cost", "false_positive": 1, "false_negative": 7},
    {"rule": "cost", "false_positive": 7, "false_negative": 1},
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ties", [False, True])
def test_a_threshold_is_the_best_of_all_cuts(rule: dict[str, object], ties: bool) -> None:
    made = ThresholdRule.model_validate(rule)
    for _ in range(20):
        outputs = 3 * randn(40, 1)
        outputs = outputs.round() if ties else outputs
        targets = (outputs + 2 * randn(40, 1) > 1).float()
        p, y = outputs.double().sigmoid().flatten().numpy(), targets.flatten().numpy()
        found = choose_threshold(made, outputs, targets)
        assert found == pytest.approx(threshold_of(made, p, y), abs=1e-12)
        assert decide(outputs, found).flatten().tolist() == (p > found).tolist()


@pytest.mark.parametrize("outputs", [[[90.0]], [[-800.0]], [[90.0], [-800.0]], [[0.0], [0.0]]])
@pytest.mark.parametrize("rule", RULES)
def test_a_threshold_is_a_probability_whatever_the_scores(
    outputs: list[list[float]], rule: dict[str, object]
) -> None:
    for label in (0.0, 1.0):
        scored = torch.tensor(outputs)
        found = choose_threshold(
            ThresholdRule.model_validate(rule), scored, torch.full_like(scored, label)
        )
        assert 0.0 < found < 1.0
        decide(scored, found)


@pytest.mark.parametrize("rule", [RULES[0], *RULES[2:]])
def test_a_threshold_divides_probabilities_near_zero(rule: dict[str, object]) -> None:
    """Rows whose logits are below -36.7, the logit of 2 ** -53."""
    outputs = torch.tensor([[-50.0], [-40.0], [-60.0], [-45.0], [-200.0], [-300.0]])
    targets = torch.tensor([[0.0], [1.0], [0.0], [1.0], [0.0], [0.0]])
    threshold = choose_threshold(ThresholdRule.model_validate(rule), outputs, targets)
    assert decide(outputs, threshold).float().tolist() == targets.tolist()


def test_without_a_threshold_half_decides() -> None:
    outputs = torch.tensor([[-1e-30], [0.0], [1e-30]])
    assert decide(outputs, None).flatten().tolist() == [False, False, True]
    assert torch.equal(decide(outputs, 0.5), decide(outputs, None))


@pytest.mark.parametrize("ties", [1, 4])
def test_survival_is_measured_pair_by_pair(ties: int) -> None:
    task = TaskSettings(kind="survival")
    hazards = (ties * randn(90, 1)).round() / ties if ties > 1 else randn(90, 1)
    times = torch.rand(90, generator=GENERATOR)
    times = (times * 20 / ties).ceil()
    targets = torch.stack([times, (randn(90) > 0).float()], dim=1)
    got = evaluate(task, hazards, targets)
    risk = hazards.flatten().numpy()
    assert got["c_index"] == pytest.approx(c_index_of(risk, *targets.T.numpy()))
    want = losses_of_rows(task, hazards.double(), targets.double())
    assert got["loss"] == pytest.approx(want.mean().item())
    nothing = torch.stack([times, torch.zeros(90)], dim=1)
    assert evaluate(task, hazards, nothing) == {"loss": 0.0}


def test_many_rows_of_survival_are_compared_in_parts() -> None:
    n = 1500
    hazards, times = torch.linspace(3, -3, n)[:, None], torch.arange(1.0, n + 1)
    targets = torch.stack([times, torch.ones(n)], dim=1)
    assert evaluate(TaskSettings(kind="survival"), hazards, targets)["c_index"] == 1.0
    assert evaluate(TaskSettings(kind="survival"), -hazards, targets)["c_index"] == 0.0


@pytest.mark.parametrize("most", [1, 40, 101])
def test_pairs_of_a_ranking_are_compared_in_parts(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of a split may be of one query: all its pairs at once fit into no memory."""
    of = loss_fn(TaskSettings.model_validate({"kind": "ranking"}))
    drawn = torch.Generator().manual_seed(0)
    query_N = torch.tensor([0.0] * 9 + [2.0] + [1.0] * 5)[torch.randperm(15, generator=drawn)]
    targets = torch.stack([torch.randint(0, 3, (15,), generator=drawn).double(), query_N], 1)
    found = []
    for parts in (1 << 20, most):
        monkeypatch.setattr(losses, "_MAX_PAIRS", parts)
        drawn.manual_seed(1)
        outputs = torch.randn(15, 1, generator=drawn, dtype=torch.float64).requires_grad_()
        weighted = of(outputs, targets, torch.arange(15.0))
        sizes = [len(each) for each, _ in losses.yield_pairs(query_N)]
        (of(outputs, targets) + weighted).backward()
        found.append((of(outputs, targets), weighted, outputs.grad, sizes))
    (whole, whole_weighted, gradient, one), (loss, weighted, others, several) = found
    assert one == [9 * 9 + 1 + 5 * 5]
    assert sum(several) == one[0]
    assert max(several) <= max(most, 9)
    torch.testing.assert_close((loss, weighted, others), (whole, whole_weighted, gradient))


@pytest.mark.parametrize("loss", ["ranknet", "listnet"])
def test_a_ranking_is_measured_pair_by_pair_and_query_by_query(loss: str) -> None:
    task = TaskSettings.model_validate({"kind": "ranking", "loss": loss, "metrics": ["ndcg_3"]})
    # Some scores are equal, some queries have one row, and some no relevant one.
    scores = (2 * randn(80, 1)).round() / 2
    query = (torch.rand(80, generator=GENERATOR) * 30).floor()
    relevance = (randn(80) * (query % 3)).clamp_min(0).round()
    targets = torch.stack([relevance, query], dim=1)
    got = evaluate(task, scores, targets)
    plain = (scores.flatten().numpy(), relevance.numpy(), query.numpy())
    assert got["ndcg"] == pytest.approx(ndcg_of(*plain))
    assert got["ndcg_3"] == pytest.approx(ndcg_of(*plain, 3))
    want = losses_of_rows(task, scores.double(), targets.double())
    assert got["loss"] == pytest.approx(want.mean().item())


@pytest.mark.parametrize("loss", ["ranknet", "listnet"])
def test_rows_that_are_alone_in_their_query_have_no_loss_and_no_ndcg(loss: str) -> None:
    task = TaskSettings.model_validate({"kind": "ranking", "loss": loss})
    targets = torch.stack([torch.ones(5), torch.arange(5.0)], dim=1)
    scores = randn(5, 1).requires_grad_()
    value = loss_fn(task)(scores, targets)
    value.backward()
    assert value.item() == 0.0
    assert present(scores.grad).abs().max() == 0.0
    assert evaluate(task, scores, targets) == {"loss": 0.0}


def test_equal_relevances_make_no_pair_and_large_scores_no_infinity() -> None:
    targets = torch.tensor([[1.0, 0], [1, 0], [2, 1], [0, 1]])
    outputs = torch.tensor([[1000.0], [-1000], [-1000], [1000]])
    found = {
        name: evaluate(
            TaskSettings.model_validate({"kind": "ranking", "loss": name}), outputs, targets
        )
        for name in ("ranknet", "listnet")
    }
    assert found["ranknet"]["loss"] == pytest.approx(2000)
    high, low = np.exp(2) / (1 + np.exp(2)), 0.5
    assert found["listnet"]["loss"] == pytest.approx((2000 * low + 2000 * high) / 2)
