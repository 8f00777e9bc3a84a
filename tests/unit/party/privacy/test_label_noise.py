"""Randomised response on labels: its probabilities, and that a label keeps its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vfl_party.base.mechanism import Mechanism
from vfl_party.privacy.accountant import compose
from vfl_party.privacy.label_noise import build_mechanism, keep_probability, randomise

ROWS = 20_000
IDS = [f"id{row}" for row in range(ROWS)]
SPLITS = {"train": np.arange(ROWS)}


def response(classes: int, epsilon: float = 1.0, column: str = "y", names: str = "") -> Mechanism:
    return build_mechanism(epsilon, column, names or "abcdefgh"[:classes], classes)


def noisy(classes: int, epsilon: float = 1.0, root: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    codes, noise = torch.arange(ROWS) % classes, response(classes, epsilon)
    return codes, randomise(codes, IDS, SPLITS, noise=noise, classes=classes, root=root)


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
        noise=response(5),
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


OTHERS = {
    "column": response(2, column="z"),
    "codes": response(2, names="ba"),
    "classes": response(3, names="ab"),
    "epsilon": response(2, 1.5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_draw_again_are_counted_again(name: str) -> None:
    """Under a common draw, the labels of another column, code or number of classes tell the noise:
    with the same draw, 38 numbers of classes told 94 % of the labels at an ε of 1, and the noisy
    labels of a column that is nearly constant told those of another one.
    """
    codes, classes = torch.arange(ROWS) % 2, 3 if name == "classes" else 2
    one = randomise(codes, IDS, SPLITS, noise=response(2), classes=2, root=1)
    other = randomise(codes, IDS, SPLITS, noise=OTHERS[name], classes=classes, root=1)
    change, changed = (one != codes).double(), (other != codes).double()
    assert changed.any()
    assert abs(float(torch.corrcoef(torch.stack([change, changed]))[0, 1])) < 5 / math.sqrt(ROWS)
    both = compose([(response(2), 3), (OTHERS[name], 2)], 1e-5)
    assert both == response(2).noise + OTHERS[name].noise


def test_a_draw_of_an_older_record_is_read_and_counted_apart() -> None:
    old = Mechanism.read("response 1.0 1.0 1")
    assert compose([(old, 1), (response(2), 1)], 1e-5) == 2.0
    with pytest.raises(ValueError, match="one two"):
        Mechanism.read("response 1.0 1.0 1 one two")


def test_labels_that_metrics_need_stay_as_they_are() -> None:
    codes = (torch.arange(ROWS) % 2)[:, None].float()
    splits = {
        "train": np.arange(100, ROWS),
        "validation": np.arange(50),
        "test": np.arange(50, 100),
    }
    found = randomise(codes, IDS, splits, noise=response(2, 0.5), classes=2, root=1)
    assert found.dtype == codes.dtype
    assert torch.equal(found[:100], codes[:100])
    assert not torch.equal(found[100:], codes[100:])


def test_its_epsilon_does_not_grow_with_use_and_adds_up_with_other_mechanisms() -> None:
    one = response(2)
    assert compose([(one, 1)], 1e-5) == compose([(one, 500)], 1e-5) == 1.0
    assert compose([(one, 3), (response(2, 0.5), 1)], 1e-5) == 1.5
    assert type(one).read(one.text) == one
