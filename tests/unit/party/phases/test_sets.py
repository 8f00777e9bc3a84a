"""Sets of parties: how they are drawn, what they weigh, and what they combine."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.harness import cases
from vfl_common.config.recipe import Recipe
from vfl_party.models.top import StandIns
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk
from vfl_party.phases.sets import Sets, SetSettings, select_embeddings, sum_losses

NAMES = ("p1", "p2", "p3")
Z = {name: torch.full((2, 3), float(number)) for number, name in enumerate(NAMES)}


def sets(**settings: Any) -> Sets:
    recipe = Recipe.model_validate(cases.recipe(4, model={"combine": "mean"}))
    party = cast(Party, SimpleNamespace(recipe=recipe, models={}, name="p0"))
    return Sets(party, "splitnn", SetSettings(**settings))


def test_the_expected_loss_is_that_over_all_sets_by_their_sizes() -> None:
    """Each set J of the active party and others counts 1 / |J| on average."""
    draws, drawn = 4000, sets(subsets=True)
    found = defaultdict[frozenset[str], float](float)
    for batch in range(draws):
        for each in drawn.draw(NAMES, 0, batch) or []:
            found[frozenset(each.there)] += each.weight / draws
    for count in range(4):
        for others in itertools.combinations(NAMES, count):
            assert found[frozenset(others)] == pytest.approx(1 / (1 + count), rel=0.1)


def test_parties_are_left_out_by_the_probability_and_apart() -> None:
    drawn, there = sets(party_dropout=0.3), Counter[tuple[str, ...]]()
    for batch in range(4000):
        (only,) = drawn.draw(NAMES, 0, batch) or []
        assert only.weight == 1.0
        there[tuple(only.there)] += 1
    assert there[NAMES] / 4000 == pytest.approx(0.7**3, rel=0.1)
    assert there[("p2",)] / 4000 == pytest.approx(0.7 * 0.3**2, rel=0.3)


def test_a_batch_has_the_same_sets_whenever_it_is_drawn() -> None:
    one, again = sets(subsets=True), sets(subsets=True)
    assert one.draw(NAMES, 1, 2) == again.draw(NAMES, 1, 2)
    # Somewhere they differ.
    assert len({str(one.draw(NAMES, 1, batch)) for batch in range(20)}) > 3
    assert sets().draw(NAMES, 1, 2) is None


def test_who_is_left_out_is_replaced_by_what_is_learnt_or_by_nothing() -> None:
    assert [*select_embeddings(["p3", "p1"], Z, None)] == ["p1", "p3"]
    vectors = StandIns(dict.fromkeys(NAMES, 3))
    with torch.no_grad():
        vectors.vectors[1] += 7.0
    found = select_embeddings(["p3", "p1"], Z, vectors)
    assert {name: each[0, 0].item() for name, each in found.items()} == {
        "p1": 0.0,
        "p2": 7.0,
        "p3": 2.0,
    }
    assert [
        name for name, z in Chunk([], dict(Z), 2).of(["p2"]).others.items() if z is not None
    ] == ["p2"]


def test_losses_add_by_their_weights() -> None:
    drawn = sets(subsets=True).draw(NAMES, 0, 0) or []
    losses = [torch.tensor(float(number)) for number in range(4)]
    # C(3, k - 1) / k for k = 1 to 4.
    assert float(sum_losses(losses, drawn)) == pytest.approx(0 * 1 + 1 * 3 / 2 + 2 * 1 + 3 / 4)
    assert sum_losses(losses, None) is losses[0]
