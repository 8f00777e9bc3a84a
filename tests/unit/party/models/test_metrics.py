"""Metrics against scikit-learn, and what torchmetrics must not bring in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from vfl_common.config.models import TaskSettings
from vfl_party.models.metrics import evaluate, loss_fn, scores

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
