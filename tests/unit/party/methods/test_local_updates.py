"""The parts of local updates and of steps in flight: rows' weights, the ring, copies of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_party.methods.splitnn.local import (
    ExchangedBatch,
    ExchangeRing,
    WeightCopies,
    compute_row_weights,
)
from vfl_party.methods.splitnn.settings import CacheSettings


def test_a_row_weighs_its_cosine_or_nothing() -> None:
    angles = torch.tensor([0.0, 30.0, 59.9, 60.1, 90.0, 180.0]) * math.pi / 180
    now = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor(
        [[1.0], [1e-30], [1e30], [1.0], [1.0], [1.0]]
    )
    stale = torch.tensor([[1e-30, 0.0]]).expand(6, 2)
    want = torch.tensor([1.0, math.cos(math.pi / 6), math.cos(59.9 * math.pi / 180), 0.0, 0.0, 0.0])
    assert torch.allclose(compute_row_weights(now, stale, 0.5), want[:, None], atol=1e-6)
    assert compute_row_weights(now, stale, -1.0)[5].item() == pytest.approx(-1.0)


def test_a_row_of_zeros_weighs_nothing() -> None:
    zeros, ones = torch.zeros(1, 3), torch.ones(1, 3)
    for a, b in ((zeros, ones), (ones, zeros), (zeros, zeros)):
        assert compute_row_weights(a, b, -1.0).item() == 0.0


def used(batches: int, uses: int, exchanges: int, *, saved: int = -1) -> list[list[int]]:
    """Which exchanges are used after each; the ring is saved and loaded after ``saved``."""
    ring, found = ExchangeRing(CacheSettings(batches=batches, uses=uses)), []
    for t in range(exchanges):
        rows = np.array([t])
        found.append(
            [int(each.rows[0]) for each in ring.put(ExchangedBatch(rows, {"p": torch.ones(1)}, {}))]
        )
        if t == saved:
            tree, ring = ring.state(), ExchangeRing(CacheSettings(batches=batches, uses=uses))
            ring.load_state(tree)
    return found


def test_the_ring_goes_round_in_a_fixed_order() -> None:
    assert used(3, 2, 5) == [[0], [0], [1, 2], [3, 1], [2, 3]]
    assert used(2, 3, 3) == [[0, 0], [1, 0, 1], [2, 1, 2]]


@pytest.mark.parametrize(("batches", "uses"), [(5, 5), (3, 2), (2, 7), (1, 4), (4, 1)])
def test_each_exchange_is_used_so_often_as_asked(batches: int, uses: int) -> None:
    found = used(batches, uses, 40)
    counts = [sum(each.count(t) for each in found) for t in range(40 - batches)]
    # Slots that are still empty at the beginning are left out, and no exchange is used in their
    # place.
    assert counts == [uses] * (40 - batches)
    assert all(max(each) - min(each) < batches for each in found)


def test_a_saved_ring_goes_on() -> None:
    assert used(3, 4, 9, saved=4) == used(3, 4, 9)


def test_a_gradient_of_a_copy_is_that_of_the_weights_then() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    model[2].bias.requires_grad_(False)
    copies, x = (
        WeightCopies(model, 2, predicts=False),
        torch.randn(4, 2, generator=torch.Generator().manual_seed(1)),
    )
    model(x).sum().backward()
    want = [each.grad for each in model.parameters()]
    weights = copies.take(0)
    with copies.use(weights):
        z = model(x)
    with torch.no_grad():
        for each in model.parameters():
            each.grad = None
            each.mul_(2.0)
    z.sum().backward()
    copies.move_gradient(weights)
    for own, gradient in zip(model.parameters(), want, strict=True):
        if own.grad is None or gradient is None:
            assert own.grad is gradient
        else:
            assert torch.equal(own.grad, gradient)
    assert all(each.grad is None for each in weights)


def test_an_encoder_that_keeps_its_weights_elsewhere_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.also = [self.layer.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.also[0]

    model = Hidden()
    copies = WeightCopies(model, 2, predicts=False)
    weights = copies.take(0)
    with copies.use(weights):
        z = model(torch.ones(1, 2))
    z.sum().backward()
    with raises(InputError, Code.MODEL_INVALID, names="in_flight"):
        copies.move_gradient(weights)


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    copies = WeightCopies(model, 2, predicts=False)
    weights = copies.take(0)
    assert len(weights) == 1
    with copies.use(weights):
        assert model[0].weight is model[1].weight is weights[0]
        z = model(torch.ones(1, 2))
    z.sum().backward()
    copies.move_gradient(weights)
    (got,) = [each.grad for each in model.parameters()]
    (want,) = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
    assert got is not None
    assert torch.equal(got, want)
