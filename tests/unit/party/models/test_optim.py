"""Optimizers against torch's defaults, bit by bit between runs, and the learning rate by its
formula.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as torchs

from tests.harness.errors import raises
from vfl_common.config.base import parse
from vfl_common.config.models import OptimizerSettings
from vfl_common.errors import Code, InputError
from vfl_party.models import seed_torch
from vfl_party.models.training import Plateau, build_optimizer, build_schedule, clip

SETTINGS = [
    (OptimizerSettings(kind="sgd", lr=0.05), SGD, {}),
    (
        OptimizerSettings(kind="sgd", lr=0.02, momentum=0.9, weight_decay=1e-3),
        SGD,
        {"momentum": 0.9},
    ),
    (OptimizerSettings(kind="adam", lr=1e-3, weight_decay=1e-3), Adam, {}),
    (OptimizerSettings(kind="adamw", lr=1e-3, weight_decay=0.1), AdamW, {}),
    (OptimizerSettings(kind="adagrad", lr=1e-2, weight_decay=1e-3), Adagrad, {}),
]


def trained(make: Any, steps: int = 300) -> torch.Tensor:
    """All parameters of a 16-32-4 MLP in float64's place: one flat float32 tensor after ``steps``
    steps.
    """
    with seed_torch(5):
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


@pytest.mark.slow
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
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
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
    makers: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    more = {"momentum": momentum} if kind == "sgd" else {}
    theirs = stepped(
        lambda params: makers[kind](params, lr=0.05, weight_decay=1e-3, fused=True, **more)
    )
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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


def composed(
    warmup: int, after: Callable[[Optimizer], torchs.LRScheduler], steps: int
) -> list[float]:
    """The rates of torch's own warm-up with a schedule of torch's after it."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.2)
    schedule = after(optimizer)
    if warmup:
        rise = torchs.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
        schedule = torchs.SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("kind", ["constant", "cosine", "step"])
def test_schedules_and_their_warm_up_are_torchs(kind: str, warmup: int) -> None:
    more = {"step_epochs": 2, "factor": 0.3} if kind == "step" else {}
    settings = OptimizerSettings.model_validate(
        {"lr": 0.2, "schedule": kind, "warmup_epochs": warmup, **more}
    )

    def after(optimizer: Optimizer) -> torchs.LRScheduler:
        if kind == "constant":
            return torchs.ConstantLR(optimizer, 1.0)
        if kind == "cosine":
            return torchs.CosineAnnealingLR(optimizer, 9 - warmup)
        return torchs.StepLR(optimizer, 2, 0.3)

    assert rates(settings, 9, 9) == pytest.approx(composed(warmup, after, 9), rel=1e-9, abs=1e-12)


@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    patience=st.integers(1, 4),
    warmup=st.integers(0, 3),
    cut=st.integers(0, 40),
)
def test_a_plateau_lowers_the_rate_as_torchs_does(
    values: list[float], patience: int, warmup: int, cut: int
) -> None:
    settings = OptimizerSettings(
        lr=0.2, schedule="plateau", factor=0.5, plateau_patience=patience, warmup_epochs=warmup
    )
    optimizer = build_optimizer(settings, [nn.Parameter(torch.ones(1))])
    schedule = build_schedule(settings, optimizer, 50)
    theirs = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    falls = torchs.ReduceLROnPlateau(
        theirs, factor=0.5, patience=patience - 1, threshold=0.0, eps=0.0
    )
    best = math.inf
    for epoch, value in enumerate(values):
        if epoch == cut:
            saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
            optimizer = build_optimizer(settings, [nn.Parameter(torch.ones(1))])
            schedule = build_schedule(settings, optimizer, 50)
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
        warm = min(1.0, (epoch + 1) / (warmup + 1))
        want = 0.2 * warm * theirs.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["lr"] == pytest.approx(want, rel=1e-12)
        optimizer.step()
        schedule.step()
        assert isinstance(schedule, Plateau)
        schedule.note_validation(best=value < best)
        best = min(best, value)
        falls.step(value)


def test_a_warm_up_leaves_an_epoch_with_the_whole_rate() -> None:
    settings = OptimizerSettings(warmup_epochs=3)
    assert rates(settings, 4, 4)[3] == settings.lr
    with raises(InputError, Code.CONFIG_INVALID, names="optimizer.warmup_epochs"):
        rates(settings, 3, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "kind": "adamw"},
        {"schedule": "step"},
        {"schedule": "cosine", "step_epochs": 3},
        {"schedule": "constant", "factor": 0.5},
        {"schedule": "step", "step_epochs": 3, "plateau_patience": 2},
        {"schedule": "step", "step_epochs": 3, "factor": 1.0},
        {"warmup_epochs": -1},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        parse(OptimizerSettings, settings, "optimizer")


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
