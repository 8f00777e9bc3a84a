"""Shapley values of parties, beside the mean over all orders, one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.harness.reference_worth import brute_force
from vfl_party.methods.evaluate.subsets import (
    compute_additions,
    compute_exact_values,
    list_all_sets,
    list_some_sets,
)

NAMES = ("bank", "shop", "clinic", "phone", "city", "rail")


def values(players: tuple[str, ...], seed: int = 3) -> dict[frozenset[str], float]:
    random = np.random.default_rng(seed)
    return {each: float(random.normal()) for each in list_all_sets(players)}


@pytest.mark.parametrize("count", range(1, 7))
def test_values_are_the_mean_over_all_orders(count: int) -> None:
    players = NAMES[:count]
    value = values(players)
    assert len(value) == 2**count
    found = compute_exact_values(players, {each: np.array([v, 2 * v]) for each, v in value.items()})
    for name, want in brute_force(players, value).items():
        assert found[name] == pytest.approx([want, 2 * want], abs=1e-12)
    whole = value[frozenset(players)] - value[frozenset()]
    assert math.fsum(each[0] for each in found.values()) == pytest.approx(whole, abs=1e-9)


def test_a_party_that_adds_nothing_is_worth_nothing() -> None:
    value = {each: float(len(each - {"shop"})) for each in list_all_sets(NAMES[:3])}
    found = compute_exact_values(NAMES[:3], {each: np.array([v]) for each, v in value.items()})
    assert found["shop"] == pytest.approx([0.0], abs=1e-15)
    assert found["bank"] == pytest.approx([1.0])


def test_all_orders_give_the_exact_values_and_some_give_their_sum() -> None:
    players = NAMES[:4]
    value = {each: np.array([v]) for each, v in values(players).items()}
    orders = list(itertools.permutations(players))
    whole = compute_additions(orders, value)
    for name, want in compute_exact_values(players, value).items():
        assert whole[name].mean(axis=0) == pytest.approx(want, abs=1e-12)
    some = compute_additions(orders[5:9], value)
    total = sum(each.mean(axis=0) for each in some.values())
    assert total == pytest.approx(value[frozenset(players)] - value[frozenset()], abs=1e-9)


def test_sets_of_many_players_are_those_that_orders_pass_through() -> None:
    few = list_some_sets(NAMES[:3], [])
    assert few == list_all_sets(NAMES[:3])
    found = list_some_sets(NAMES, [NAMES])
    assert len(found) == len(set(found)) == 2 + 6 + 6 + 3
    assert frozenset(NAMES[:3]) in found
    assert found[0] == frozenset()
    assert found[-1] == frozenset(NAMES)
