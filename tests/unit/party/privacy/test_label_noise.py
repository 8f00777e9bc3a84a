"""Randomised response on labels: its probabilities, and that a label keeps its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vfl_party.privacy.accountant import composed
from vfl_party.privacy.label_noise import keep_probability, mechanism, randomise

ROWS = 20_000
IDS = [f"id{row}" for row in range(ROWS)]
SPLITS = {"train": np.arange(ROWS)}


def noisy(classes: int, epsilon: float = 1.0, root: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.arange(ROWS) % classes
    return codes, randomise(codes, IDS, SPLITS, epsilon=epsilon, classes=classes, root=root)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_label_becomes_each_other_class_as_often(classes: int, epsilon: float) -> None:
    codes, found = noisy(classes, epsilon)
    counts = torch.bincount(codes * classes + found, minlength=classes**2).reshape(classes, classes)
    keep = keep_probability(epsilon, classes)
    other = (1 - keep) / (classes - 1)
    assert keep / other == pytest.approx(math.exp(epsilon))
    want = torch.full((classes, classes), other).fill_diagonal_(keep)
    # Five standard deviations.
    bound = 5 * (want * (1 - want) / (ROWS / classes)).sqrt()
    assert ((counts / (ROWS / classes) - want).abs() <= bound).all()


def test_a_label_keeps_its_noise_whatever_the_other_rows_are() -> None:
    codes, found = noisy(5)
    rows = np.random.default_rng(0).permutation(ROWS)[:1000]
    again = randomise(
        codes[rows],
        [IDS[row] for row in rows],
        {"train": np.arange(1000)},
        epsilon=1.0,
        classes=5,
        root=1,
    )
    assert torch.equal(again, found[rows])
    assert (found != codes).any()


@pytest.mark.parametrize(("epsilon", "root"), [(1.0, 2), (1.5, 1)])
def test_another_secret_or_epsilon_draws_independently(epsilon: float, root: int) -> None:
    codes, one = noisy(2)
    _, other = noisy(2, epsilon, root)
    change, changed = (one != codes).double(), (other != codes).double()
    assert abs(float(torch.corrcoef(torch.stack([change, changed]))[0, 1])) < 5 / math.sqrt(ROWS)


def test_labels_that_metrics_need_stay_as_they_are() -> None:
    codes = (torch.arange(ROWS) % 2)[:, None].float()
    splits = {
        "train": np.arange(100, ROWS),
        "validation": np.arange(50),
        "test": np.arange(50, 100),
    }
    found = randomise(codes, IDS, splits, epsilon=0.5, classes=2, root=1)
    assert found.dtype == codes.dtype
    assert torch.equal(found[:100], codes[:100])
    assert not torch.equal(found[100:], codes[100:])


def test_its_epsilon_does_not_grow_with_use_and_adds_up_with_other_mechanisms() -> None:
    one = mechanism(1.0)
    assert composed([(one, 1)], 1e-5) == composed([(one, 500)], 1e-5) == 1.0
    assert composed([(one, 3), (mechanism(0.5), 1)], 1e-5) == 1.5
    assert type(one).read(one.text) == one
