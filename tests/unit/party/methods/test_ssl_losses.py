"""Losses against lightly's (values and gradients, see ``ssl_reference``), queue, momentum update,
variance.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.unit.party.methods.ssl_reference import (
    FILE,
    SHAPES,
    TEMPERATURES,
    by_lightly,
    inputs,
    measured,
)
from vfl_common.config.models import OptimizerSettings
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.models import seed_torch
from vfl_party.selfsup.losses import (
    KeyQueue,
    byol,
    ema_update,
    moco,
    nt_xent,
    simsiam,
    variance_kept,
)
from vfl_party.selfsup.settings import AugmentSettings, SelfSupSettings, make_plan


def ours() -> dict[str, list[float]]:
    found = {}
    for rows, width in SHAPES:
        p_BD, z_BD, queue_QD = inputs(rows, width)
        found[f"simsiam {rows} {width}"] = measured(simsiam(p_BD, z_BD), p_BD)
        found[f"byol {rows} {width}"] = measured(byol(p_BD, z_BD), p_BD)
        for tau in TEMPERATURES:
            found[f"nt_xent {rows} {width} {tau}"] = measured(nt_xent(p_BD, z_BD, tau), p_BD, z_BD)
            found[f"moco {rows} {width} {tau}"] = measured(moco(p_BD, z_BD, queue_QD, tau), p_BD)
    return found


def test_losses_and_gradients_are_those_that_lightly_gave() -> None:
    recorded = json.loads(FILE.read_text())
    found = ours()
    assert found.keys() == recorded.keys()
    for name, values in found.items():
        assert values == pytest.approx(recorded[name], rel=1e-6, abs=1e-6), name


@pytest.mark.skipif(importlib.util.find_spec("lightly") is None, reason="lightly is not installed")
def test_losses_and_gradients_are_those_that_lightly_gives() -> None:
    for name, values in by_lightly().items():
        assert values == pytest.approx(ours()[name], rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("loss", [simsiam, byol, lambda p, z: moco(p, z, torch.eye(4), 0.2)])
def test_no_gradient_flows_into_the_target(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    p_BD, z_BD = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    loss(p_BD, z_BD).backward()
    assert p_BD.grad is not None
    assert p_BD.grad.abs().sum() > 0
    assert z_BD.grad is None


def test_extremes_of_the_losses() -> None:
    z_BD = torch.randn(5, 8)
    assert simsiam(3 * z_BD, z_BD).item() == pytest.approx(-1, abs=1e-6)
    assert byol(-z_BD, z_BD).item() == pytest.approx(4, abs=1e-6)
    # One pair has nothing to be told from.
    assert nt_xent(z_BD[:1], z_BD[1:2], 0.1).item() == 0


def test_a_queue_starts_with_the_same_random_unit_rows_and_normalises_what_is_pushed() -> None:
    queue = KeyQueue(6, 4, seed=1)
    assert torch.equal(queue.keys, KeyQueue(6, 4, seed=1).keys)
    assert not torch.equal(queue.keys, KeyQueue(6, 4, seed=2).keys)
    pushed = torch.randn(3, 4, requires_grad=True)
    queue.push(7 * pushed)
    assert not queue.keys.requires_grad
    torch.testing.assert_close(queue.keys.norm(dim=1), torch.ones(6))
    torch.testing.assert_close(queue.keys[:3], nn.functional.normalize(pushed.detach(), dim=1))


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [4, 3, 4], [5], [12], [3, 13, 1], [0, 1]])
def test_a_queue_holds_the_latest_keys_whatever_the_batches(sizes: list[int]) -> None:
    size = 5
    queue = KeyQueue(size, 3, seed=0)
    stream = list(queue.keys)
    for n in sizes:
        batch = nn.functional.normalize(torch.randn(n, 3), dim=1)
        queue.push(batch)
        stream.extend(batch)
    # The oldest first.
    by_age = queue.keys.roll(-(sum(sizes) % size), 0)
    torch.testing.assert_close(by_age, torch.stack(stream[-size:]))


def test_a_push_may_come_before_the_backward_pass() -> None:
    queue, q_BD = KeyQueue(4, 3, seed=0), torch.randn(2, 3, requires_grad=True)
    loss = moco(q_BD, torch.randn(2, 3), queue.keys, 0.2)
    expected = torch.autograd.grad(loss, q_BD, retain_graph=True)[0]
    queue.push(torch.randn(3, 3))
    assert torch.equal(torch.autograd.grad(loss, q_BD)[0], expected)


def test_a_queue_goes_on_from_a_checkpoint() -> None:
    first, second = KeyQueue(5, 3, seed=0), KeyQueue(5, 3, seed=9)
    first.push(torch.randn(3, 3))
    state = unpack(*pack(first.state()))
    batches = torch.randn(2, 4, 3)
    first.push(batches[0])
    second.load_state(state)
    second.push(batches[0])
    assert torch.equal(first.keys, second.keys)
    first.push(batches[1])
    second.push(batches[1])
    assert torch.equal(first.keys, second.keys)


def test_the_momentum_update_moves_parameters_and_leaves_buffers() -> None:
    def net(seed: int) -> nn.Module:
        with seed_torch(seed):
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    target, online = net(1), net(2)
    # Moves the statistics.
    online(torch.randn(8, 3))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    ema_update(target, online, 0.99)
    parameters = dict(target.named_parameters())
    for name, value in target.state_dict().items():
        if name in parameters:
            expected = 0.99 * before[name] + 0.01 * online.state_dict()[name]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-7)
        else:
            assert torch.equal(value, before[name]), name
    assert all(p.requires_grad and p.grad is None for p in target.parameters())
    with pytest.raises(RuntimeError):
        ema_update(target, nn.Linear(3, 4), 0.99)


def test_the_kept_variance_is_one_over_the_sphere_and_zero_when_collapsed() -> None:
    random = torch.Generator().manual_seed(0)
    gaussian = torch.randn(4096, 64, generator=random)
    assert variance_kept(gaussian).item() == pytest.approx(1, abs=0.02)
    assert variance_kept(
        torch.ones(16, 8) * torch.rand(16, 1, generator=random)
    ).item() == pytest.approx(0, abs=1e-6)
    assert variance_kept(gaussian[:1]).item() == 0
    # One of two dimensions used, fully: directions vary.
    half = torch.cat([torch.eye(2)[:1], -torch.eye(2)[:1]])
    assert variance_kept(half).item() == pytest.approx(1)
    assert not variance_kept(gaussian.requires_grad_()).requires_grad


def test_the_released_plan_has_what_the_code_does_unless_it_is_written() -> None:
    given = SelfSupSettings(ssl="simsiam")
    paper, released = make_plan(given, "paper"), make_plan(given, "released")
    assert (paper.optimizer.clip_norm, released.optimizer.clip_norm) == (None, 5.0)
    assert (paper.anneals_predictor, released.anneals_predictor) == (True, False)
    views = released.augment
    assert (views.corrupt, views.replacement, views.exact_share) == ("one", "uniform", True)
    own = OptimizerSettings(kind="adagrad", lr=0.01)
    written = SelfSupSettings(
        ssl="simsiam", optimizer=own, augment=AugmentSettings(exact_share=False), projector=()
    )
    plan = make_plan(written, "released")
    assert plan.optimizer == own
    assert (plan.augment.exact_share, plan.augment.replacement) == (False, "uniform")
    assert plan.width(7) == 7
