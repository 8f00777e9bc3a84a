"""Optimizers against torch's defaults, bit by bit between runs, and the learning rate by its
formula.
"""

from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tests.harness.sentences import raises
from vfl_common.config.models import OptimizerSettings
from vfl_party.models import seeded
from vfl_party.models.optim import build_optimizer, build_schedule, clip

SETTINGS = [
    (OptimizerSettings(kind="sgd", lr=0.05), SGD, {}),
    (
        OptimizerSettings(kind="sgd", lr=0.02, momentum=0.9, weight_decay=1e-3),
        SGD,
        {"momentum": 0.9},
    ),
    (OptimizerSettings(kind="adam", lr=1e-3, weight_decay=1e-3), Adam, {}),
    (OptimizerSettings(kind="adagrad", lr=1e-2, weight_decay=1e-3), Adagrad, {}),
]


def trained(make: Any, steps: int = 300) -> torch.Tensor:
    """All parameters of a 16-32-4 MLP in float64's place: one flat float32 tensor after ``steps``
    steps.
    """
    with seeded(5):
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        x, y = torch.randn(64, 16), torch.randn(64, 4)
    optimizer: Optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


@pytest.mark.parametrize(("settings", "kind", "extra"), SETTINGS)
def test_steps_repeat_bit_by_bit_and_agree_with_the_default(
    settings: OptimizerSettings, kind: Any, extra: dict[str, Any]
) -> None:
    ours = trained(lambda params: build_optimizer(settings, params))
    assert torch.equal(ours, trained(lambda params: build_optimizer(settings, params)))
    default = trained(
        lambda params: kind(params, lr=settings.lr, weight_decay=settings.weight_decay, **extra)
    )
    torch.testing.assert_close(ours, default, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "odd", ["", "no gradient", "now and then none", "dtype", "momentum", "loaded"]
)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_steps_are_those_of_torchs_kernel(kind: str, odd: str) -> None:
    momentum = 0.9 if (kind, odd) == ("sgd", "momentum") else 0.0
    settings = OptimizerSettings.model_validate(
        {"kind": kind, "lr": 0.05, "weight_decay": 1e-3, "momentum": momentum}
    )

    def stepped(make: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        dtypes = [torch.float32, torch.float64 if odd == "dtype" else torch.float32, torch.float32]
        params = [
            nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)) for dtype in dtypes
        ]
        optimizer = make(params)
        for step in range(6):
            for place, each in enumerate(params):
                grad = torch.randn(5, 3, generator=generator).to(each.dtype)
                lacks = odd == "no gradient" or (odd == "now and then none" and step % 3 == 1)
                each.grad = None if lacks and place == 1 else grad
            optimizer.step()
            if odd == "loaded" and step == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return [each.detach() for each in params]

    ours = stepped(lambda params: build_optimizer(settings, params))
    torchs = stepped(
        lambda params: (
            SGD(params, lr=0.05, weight_decay=1e-3, momentum=momentum, fused=True)
            if kind == "sgd"
            else Adam(params, lr=0.05, weight_decay=1e-3, fused=True)
        )
    )
    assert all(torch.equal(one, other) for one, other in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("settings", [SETTINGS[0][0], SETTINGS[2][0]], ids=["sgd", "adam"])
def test_a_sparse_gradient_is_refused_as_by_torch(settings: OptimizerSettings) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = build_optimizer(settings, table.parameters())
    table(torch.tensor([1])).sum().backward()
    with raises(RuntimeError):
        optimizer.step()


def test_the_state_of_an_optimizer_goes_on_where_it_stopped() -> None:
    def resumed(params: Any) -> Optimizer:
        params = list(params)
        first = build_optimizer(SETTINGS[2][0], params)
        for p in params:
            p.grad = torch.ones_like(p)
        first.step()
        second = build_optimizer(SETTINGS[2][0], params)
        second.load_state_dict(first.state_dict())
        second.step()
        return second

    def straight(params: Any) -> Optimizer:
        params = list(params)
        first = build_optimizer(SETTINGS[2][0], params)
        for p in params:
            p.grad = torch.ones_like(p)
        first.step()
        first.step()
        return first

    assert torch.equal(trained(resumed, steps=3), trained(straight, steps=3))


def rates(settings: OptimizerSettings, epochs: int, steps: int) -> list[float]:
    optimizer = build_optimizer(settings, [nn.Parameter(torch.ones(1))])
    schedule = build_schedule(settings, optimizer, epochs)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_a_constant_rate_stays() -> None:
    assert rates(OptimizerSettings(lr=0.1), 3, 5) == [0.1] * 6


def test_a_cosine_rate_falls_to_zero_and_stays_there() -> None:
    seen = rates(OptimizerSettings(lr=0.2, schedule="cosine"), 4, 5)
    assert seen[:5] == pytest.approx(
        [0.1 * (1 + math.cos(math.pi * e / 4)) for e in range(5)], abs=1e-12
    )
    assert all(a >= b for a, b in pairwise(seen))
    assert seen[-2:] == [0.0, 0.0]


def test_a_schedule_goes_on_where_it_stopped() -> None:
    settings = OptimizerSettings(lr=0.2, schedule="cosine")
    first = build_optimizer(settings, [nn.Parameter(torch.ones(1))])
    schedule = build_schedule(settings, first, 4)
    first.step()
    schedule.step()
    second = build_optimizer(settings, [nn.Parameter(torch.ones(1))])
    resumed = build_schedule(settings, second, 4)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    for optimizer, each in ((first, schedule), (second, resumed)):
        optimizer.step()
        each.step()
    assert first.param_groups[0]["lr"] == second.param_groups[0]["lr"] == pytest.approx(0.1)


def test_clipping_bounds_the_joint_norm_and_only_where_it_is_asked_for() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    # Norm 7.
    params[0].grad, params[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    clip(OptimizerSettings(), iter(params))
    assert params[0].grad.tolist() == [2.0, 3.0]
    clip(OptimizerSettings(clip_norm=0.7), iter(params))
    assert torch.cat([p.grad for p in params if p.grad is not None]).tolist() == pytest.approx(
        [0.2, 0.3, 0.6], rel=1e-5
    )
