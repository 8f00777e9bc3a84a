"""Noise as targets: the sphere, the matching, and how it couples records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vfl_common.config.recipe import Recipe
from vfl_party.data import Features
from vfl_party.methods.fedonce.phase import (
    Nat,
    draw_targets,
    match_targets,
    nat_loss,
    principal_components,
)
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData

ROWS, WIDTH, BATCH = 300, 3, 100


def test_targets_lie_on_the_sphere_and_point_everywhere() -> None:
    targets = draw_targets(20_000, WIDTH, 7)
    assert torch.allclose(targets.norm(dim=1), torch.ones(20_000))
    assert targets.mean(dim=0).abs().max() < 0.02
    assert torch.equal(targets, draw_targets(20_000, WIDTH, 7))
    assert not torch.equal(targets, draw_targets(20_000, WIDTH, 8))


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_a_matching_is_a_permutation_that_does_not_cost_more(n: int) -> None:
    torch.manual_seed(n)
    for _ in range(5):
        z, c = torch.randn(n, WIDTH).tanh(), draw_targets(n, WIDTH, n)
        order = match_targets(z, c)
        assert sorted(order.tolist()) == list(range(n))
        assert nat_loss(z, c[order]) <= nat_loss(z, c) + 1e-7
        again = c[order]
        # It is the best one already.
        assert match_targets(z, again).tolist() == list(range(n))


def test_a_matching_finds_what_was_shuffled() -> None:
    c = draw_targets(BATCH, WIDTH, 1)
    shuffle = torch.randperm(BATCH, generator=torch.Generator().manual_seed(0))
    assert torch.equal(c[match_targets(c[shuffle] + 1e-4, c)], c[shuffle])


def learner(x: Tensor, **settings: Any) -> Nat:
    """A party's learner on rows ``x``, with the same initial weights each time."""
    tables = {
        "name": "nat",
        "task": {"kind": "binary"},
        "parties": [{"name": "active", "role": "active"}, {"name": "passive", "role": "passive"}],
        "model": {"embedding_size": WIDTH},
        "phases": [{"kind": "fedonce"}],
    }
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(x.shape[1], 30), nn.ReLU(), nn.Linear(30, WIDTH), nn.Tanh())
    party = Party(
        name="passive",
        course=Course(Recipe.model_validate(tables)),
        device=torch.device("cpu"),
        models={"encoder": encoder},
        data=PartyData({"train": np.arange(len(x), dtype=np.int64)}, features=Features(x)),
    )
    return Nat(party, "fedonce", FedOnceSettings(batch_size=BATCH, epochs=3, **settings))


def coupled(record: int, **settings: Any) -> int:
    """How many other records have other targets after one epoch because ``record`` was another
    one.
    """
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(5))
    other = x.clone()
    other[record] = torch.randn(7, generator=torch.Generator().manual_seed(100 + record))
    found = []
    for rows in (x, other):
        nat = learner(rows, **settings)
        nat.run_round(0)
        found.append(nat.targets)
    differs = (found[0] != found[1]).any(dim=1)
    differs[record] = False
    return int(differs.sum())


def test_matching_couples_records_and_fixed_targets_do_not(record_property: Any) -> None:
    """Why differential privacy needs fixed targets: a record's influence is not that of its own
    gradient alone.
    """
    with_matching = [coupled(record) for record in range(12)]
    mean = sum(with_matching) / len(with_matching)
    record_property("coupled_records", mean)
    print(
        f"replacing one record moves the targets of {mean:.1f} others on average, {max(with_matching)} at most"
    )
    assert mean > 1
    assert all(coupled(record, matching=False) == 0 for record in range(3))


def test_targets_migrate_by_row_and_no_target_is_lost() -> None:
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(5))
    nat = learner(x, match_every=2)
    drawn = nat.targets.clone()
    first, second = nat.run_round(0), nat.run_round(1)
    matched = nat.targets.clone()
    assert not torch.equal(matched, drawn)
    assert 0 < first.metrics["local"]["moved"] <= 1
    # F = 2: no matching in the second epoch.
    assert "moved" not in second.metrics["local"]
    nat.run_round(2)
    for targets in (matched, nat.targets):
        assert torch.equal(sorted_rows(targets), sorted_rows(drawn))


def sorted_rows(c: Tensor) -> Tensor:
    return c[np.lexsort(c.T.numpy())]


def test_state_takes_the_targets_with_it() -> None:
    x = torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(5))
    first, second = learner(x), learner(x)
    first.run_round(0)
    second.load_state(first.state())
    assert torch.equal(first.targets, second.targets)


def test_principal_components_are_those_of_the_covariance() -> None:
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [5.0, 1, 3, 1, 1, 2]
    )
    mean, axes, kept = principal_components(x, 3)
    values, vectors = np.linalg.eigh(np.cov(x.double().numpy().T))
    best = vectors[:, ::-1][:, :3].T
    assert np.allclose(np.abs(best @ axes.numpy().T), np.eye(3), atol=1e-9)
    assert kept == pytest.approx(values[-3:].sum() / values.sum())
    assert (axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)) > 0).all()
    assert torch.allclose(mean, x.double().mean(dim=0))
