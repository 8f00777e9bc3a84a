"""The attack on labels that are numbers: gradients of squared error, with as much noise as a closed
form has.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests.harness.errors import assert_names, raises
from tests.harness.scenes import number_scene, of, replayed
from vfl_leaks import attacks
from vfl_leaks.scene import Figure, Scene, UnfitError
from vfl_leaks.scores import rank_correlation

FIRST, EVERY, ADDED = "nothing, first round", "nothing, by direction", "nothing, all epochs"
INFORMED = "50 labels, all epochs"


def play(where: Scene) -> dict[str, Figure]:
    return {figure.knows: figure for figure in attacks.load("residuals", "test").play(where)}


def spearman_of(r: float) -> float:
    """Spearman's ρ of two normal numbers whose correlation is r."""
    return 6 / math.pi * math.asin(r / 2)


def test_the_rank_correlation_is_that_of_spearman_without_its_sign() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        a, b = random.integers(0, 6, 40).astype(float), random.standard_normal(40)
        assert rank_correlation(a, b) == pytest.approx(abs(spearmanr(a, b).statistic), abs=1e-12)
    assert rank_correlation(np.ones(5), np.arange(5.0)) == 0.0
    assert rank_correlation(np.arange(5.0), -np.arange(5.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("rounds", [1, 3])
def test_gradients_of_squared_error_give_the_order_of_the_labels(rounds: int) -> None:
    found = play(number_scene(0.0, rounds=rounds))
    assert [*found] == ([EVERY] if rounds == 1 else [EVERY, FIRST, ADDED, INFORMED])
    for figure in found.values():
        assert (figure.of, figure.unit) == ("labels", "|ρ|")
        # A regression from 50 rows has an error of its own.
        assert figure.value == pytest.approx(
            1.0, abs=0.02 if figure is found.get(INFORMED) else 1e-6
        )
        assert (figure.chance or 1) < 0.1


def test_noise_hides_as_much_as_its_closed_form_says_and_adds_up_to_little() -> None:
    """A place is y + N(0, 1): its correlation with y is 1/√2 in a round, and 1/√(1 + 1/9) over
    nine.
    """
    found = play(number_scene(1.0, rounds=9))
    for knows in (EVERY, FIRST):
        assert found[knows].value == pytest.approx(spearman_of(math.sqrt(0.5)), abs=0.03)
    assert found[ADDED].value == pytest.approx(spearman_of(math.sqrt(0.9)), abs=0.02)
    assert (found[ADDED].high, found[ADDED].batches) == (None, 1)


def test_without_the_information_it_finds_what_chance_finds() -> None:
    """|ρ| of batches of 400 without any: half-normal, its median 0.6745/√399."""
    whole = number_scene(0.0, rounds=40)
    noise = torch.Generator().manual_seed(1)
    batches = [
        replace(batch, came=torch.randn(batch.came.shape, generator=noise))
        for batch in whole.gradients()
    ]
    figure = play(replace(whole, gradients=replayed(batches)))[EVERY]
    assert figure.value == pytest.approx(0.6745 / math.sqrt(399), abs=0.01)
    assert figure.chance == pytest.approx(0.6745 / math.sqrt(399), abs=0.01)


def test_the_first_round_says_more_than_the_last_of_a_model_that_learns() -> None:
    """Gradients are those of y first, then of what the model has not learnt, which has nothing to
    do with y.
    """
    whole = number_scene(0.0, rounds=2)
    other = torch.randn(
        len(whole.labels), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    w = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
    batches = [
        batch
        if batch.round == 0
        else replace(batch, came=other[torch.from_numpy(batch.rows), None] * w)
        for batch in whole.gradients()
    ]
    found = play(replace(whole, gradients=replayed(batches)))
    assert found[FIRST].value == pytest.approx(1.0)
    assert found[EVERY].value < 0.7


def test_batches_of_one_label_are_skipped_and_classes_refused() -> None:
    whole = number_scene(0.0)
    same = of(torch.randn(1, 3), np.arange(1), 9)
    figure = play(replace(whole, gradients=replayed([*whole.gradients(), same])))[EVERY]
    assert (figure.batches, figure.skipped) == (5, 1)
    assert_names(figure.note, "direction")
    with raises(UnfitError):
        play(replace(whole, gradients=replayed([same])))
    with raises(UnfitError):
        play(replace(whole, gradients=replayed([])))
    with raises(UnfitError):
        play(replace(whole, targets=None))
