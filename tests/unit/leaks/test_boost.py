"""A malicious optimizer by hand, and what the active party sees of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.boost import Boost, drift
from tests.harness.scenes import of
from vfl_leaks.scene import Intercepted


def test_gradients_are_scaled_by_hand_and_only_of_the_model() -> None:
    own, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD([*own.parameters(), *other.parameters()], lr=1.0)
    boost = Boost(own, 1.0)
    gradients = (
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[0.5, 1.0]]),
        torch.tensor([[50.0, 2.0]]),
    )
    # Ratios 1.5, 1 (below it), 5 (above it), 3.
    wanted = ([1.0, -1.0], [0.5 * 1.5, 1.0], [50.0 * 5.0, 2.0 * 3.0])
    for gradient, want in zip(gradients, wanted, strict=True):
        before = own.weight.detach().clone(), other.weight.detach().clone()
        optimizer.zero_grad()
        (gradient * (own.weight + other.weight)).sum().backward()
        optimizer.step()
        assert (before[0] - own.weight)[0].tolist() == pytest.approx(want, rel=1e-5)
        assert torch.allclose(before[1] - other.weight, gradient, atol=1e-5)
    boost.end()
    before = own.weight.detach().clone(), other.weight.detach().clone()
    optimizer.zero_grad()
    (gradients[2] * own.weight).sum().backward()
    optimizer.step()
    assert torch.allclose(before[0] - own.weight, gradients[2], atol=1e-4)


def test_drift_is_the_relative_move_of_rows_that_both_rounds_have() -> None:
    old = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    new = torch.tensor([[0.0, 4.0], [3.0, 2.0], [9.0, 9.0]])
    found = [
        of(old, np.array([5, 6])),
        Intercepted("splitnn", 1, 0, np.array([6, 5, 7]), new),
        Intercepted("other", 0, 0, np.array([5, 6]), 100 * old),
    ]
    # Row 6 stays, row 5 moves by (0, 2).
    moved = [*drift(found)]
    assert moved == pytest.approx([2 / 5])
