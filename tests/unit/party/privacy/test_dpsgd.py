"""DP-SGD: one row's influence is bounded, noise has its size, samples are Poisson, a resumed run is
the same run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from tests.harness.errors import raises
from vfl_common.config.models import CnnSettings, OptimizerSettings
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.base.seeds import Rows
from vfl_party.models.encoders import build_cnn
from vfl_party.models.layers import InputSpec
from vfl_party.models.training import build_optimizer
from vfl_party.privacy.dpsgd import DpTraining, check_model
from vfl_party.privacy.plan import (
    DpSettings,
    compute_sampling_rate,
    count_steps_per_epoch,
    draw_batches,
)

N, B, CLIP = 96, 16, 0.05
X = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
ROWS = np.arange(N, dtype=np.int64)


# Of a batch's rows, an array of their numbers or a list.
Loss = Callable[[Any], Tensor]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sgd(module: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return SGD(module.parameters(), lr=lr)


def training(
    module: nn.Module, noise: float = 0.0, clip: float = CLIP, rows: Rows = ROWS, size: int = B
) -> DpTraining:
    return DpTraining(module, sgd(module), rows, size, noise_multiplier=noise, max_grad_norm=clip)


def loss_of(module: nn.Module) -> Loss:
    return lambda rows: mse_loss(module(X[rows]), Y[rows])


def squares(module: nn.Module, rows: Rows) -> Tensor:
    return torch.as_tensor(module(X[rows]).square().mean())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def update(module: nn.Module, rows: Rows, clip: float = CLIP) -> Tensor:
    """What one step without noise subtracts at learning rate 1."""
    before, dp = flat(module.parameters()), training(module, clip=clip)
    dp.step(rows, loss_of(module))
    return before - flat(module.parameters())


def test_a_step_is_the_clipped_mean_of_a_loop_over_rows() -> None:
    module = model()
    # 13 of 16 expected: divided by 16 all the same.
    rows = ROWS[5:18]
    total = torch.zeros(len(flat(module.parameters())))
    norms = []
    for row in rows:
        gradient = flat(torch.autograd.grad(loss_of(module)([row]), list(module.parameters())))
        norms.append(gradient.norm().item())
        total += gradient * min(1.0, CLIP / norms[-1])
    assert max(norms) > CLIP
    torch.testing.assert_close(update(module, rows), total / B, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_no_row_moves_a_step_by_more_than_the_bound(scale: float) -> None:
    rows = ROWS[:B]
    changed = {"loss": 0.0}

    def scaled(module: nn.Module) -> Loss:
        weight_B = torch.ones(B)
        weight_B[3] = changed["loss"] or 1.0
        return lambda rows: (weight_B * (module(X[rows]) - Y[rows]).square().mean(1)).mean()

    def step(keep: Rows) -> Tensor:
        module = model()
        before, dp = flat(module.parameters()), training(module)
        dp.step(keep, scaled(module) if len(keep) == B else loss_of(module))
        return before - flat(module.parameters())

    changed["loss"] = scale
    with_row, without_row = step(rows), step(np.delete(rows, 3))
    assert 0 < ((with_row - without_row).norm() * B).item() <= CLIP * (1 + 1e-3)


def test_the_noise_has_its_standard_deviation_on_full_and_on_empty_batches() -> None:
    sigma = 1.5
    for rows in (ROWS[:B], ROWS[:0]):
        torch.manual_seed(0)
        module = nn.Linear(5, 4000)
        quiet = copy.deepcopy(module)
        noisy, silent = training(module, sigma), training(quiet, 0.0)
        seen = []
        for dp, each in ((noisy, module), (silent, quiet)):
            dp.step(rows, partial(squares, each))
            seen.append(flat(each.parameters()))
        noise = (seen[0] - seen[1]) * B
        assert noise.std().item() == pytest.approx(sigma * CLIP, rel=6 / np.sqrt(2 * len(noise)))
        assert abs(noise.mean().item()) < 6 * sigma * CLIP / np.sqrt(len(noise))


def test_two_runs_have_other_noise_and_other_batches() -> None:
    results, batches = [], []
    for _ in range(2):
        module = model()
        torch.manual_seed(0)
        dp = training(module, 1.0)
        dp.step(ROWS[:0], loss_of(module))
        results.append(flat(module.parameters()))
        batches.append(np.concatenate(dp.batches(0)))
    assert not torch.equal(*results)
    first, second = batches
    assert not np.array_equal(first, second)


def test_poisson_batches_are_a_function_of_their_key_and_epoch() -> None:
    first, again = (draw_batches(7, 3, ROWS, B) for _ in range(2))
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    for other in (draw_batches(8, 3, ROWS, B), draw_batches(7, 4, ROWS, B)):
        assert not np.array_equal(np.concatenate(first), np.concatenate(other))
    assert [batch.tolist() for batch in draw_batches(1, 0, ROWS[:8], 2)] == [
        [7],
        [],
        [1, 3, 7],
        [0, 3, 4, 7],
    ]


def test_poisson_batches_have_their_mean_and_independent_rows() -> None:
    rows, size, epochs = np.arange(1000, 1500, dtype=np.int64), 20, 80
    batches = [batch for epoch in range(epochs) for batch in draw_batches(5, epoch, rows, size)]
    q, count = (compute_sampling_rate(500, size), epochs * count_steps_per_epoch(500, size))
    assert (q, len(batches)) == (0.04, count)
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.mean() == pytest.approx(size, abs=6 * np.sqrt(500 * q * (1 - q) / count))
    assert sizes.var() == pytest.approx(500 * q * (1 - q), rel=0.2)
    picks = np.bincount(np.concatenate(batches) - 1000, minlength=500)
    assert abs(picks - count * q).max() < 6 * np.sqrt(count * q * (1 - q))
    assert all(len(np.unique(batch)) == len(batch) for batch in batches)


def test_a_batch_size_of_all_rows_takes_all() -> None:
    assert [batch.tolist() for batch in draw_batches(0, 0, ROWS[:3], 10)] == [[0, 1, 2]]
    assert compute_sampling_rate(3, 10) == 1.0
    module = model()
    dp = training(module, rows=ROWS[:3], size=10)
    before = flat(module.parameters())
    dp.step(ROWS[:3], loss_of(module))
    assert torch.allclose(
        (before - flat(module.parameters())) * 3, update(model(), ROWS[:3]) * B, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad"])
def test_a_resumed_run_is_the_same_run(kind: Literal["sgd", "adam", "adagrad"]) -> None:
    settings = OptimizerSettings(kind=kind, lr=0.05, momentum=0.9 if kind == "sgd" else 0.0)

    def make(module: nn.Module) -> DpTraining:
        # Fused, as in every phase.
        optimizer = build_optimizer(settings, module.parameters())
        return DpTraining(module, optimizer, ROWS, 4, noise_multiplier=1.0, max_grad_norm=1.0)

    def epoch(dp: DpTraining, module: nn.Module, number: int) -> None:
        for rows in dp.batches(number):
            dp.step(rows, loss_of(module))

    first = model()
    straight = make(first)
    epoch(straight, first, 0)
    state, weights = unpack(*pack(straight.state())), copy.deepcopy(first.state_dict())
    epoch(straight, first, 1)

    second = model(seed=1)
    resumed = make(second)
    second.load_state_dict(weights)
    resumed.load_state(state)
    epoch(resumed, second, 1)
    assert torch.equal(flat(first.parameters()), flat(second.parameters()))
    assert resumed.spending == straight.spending
    assert straight.spending.steps == 48
    assert straight.spending.sampling_rate == pytest.approx(4 / N)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_module_stays_what_it_was() -> None:
    module = nn.ModuleDict({"encoder": model(), "top": nn.Linear(3, 3)})
    keys, attributes = list(module.state_dict()), [set(vars(layer)) for layer in module.modules()]
    dp = training(module, 1.0)
    dp.step(ROWS[:4], lambda rows: mse_loss(module["top"](module["encoder"](X[rows])), Y[rows]))
    assert list(module.state_dict()) == keys
    # Outside of a step: nothing of opacus.
    module["top"](module["encoder"](X)).sum().backward()
    assert all(getattr(p, "grad_sample", p) is None for p in module.parameters())
    dp.close()
    dp.close()
    assert [set(vars(layer)) for layer in module.modules()] == attributes
    assert not any(vars(p) for p in module.parameters())
    again = training(module)
    again.step(ROWS[:4], lambda rows: mse_loss(module["top"](module["encoder"](X[rows])), Y[rows]))


def test_images_without_batch_norm_train() -> None:
    spec = InputSpec((1, 8, 8))
    encoder = build_cnn(CnnSettings(kind="cnn", channels=(4,), batch_norm=False), spec, 3)
    images = torch.randn(N, 1, 8, 8)
    dp = training(encoder, 1.0)
    for rows in (ROWS[:5], ROWS[:0]):
        dp.step(rows, lambda r: mse_loss(encoder(images[r]), Y[r]))


def test_layers_that_opacus_does_not_know_train_too() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(5))

        def forward(self, x_BF: Tensor) -> Tensor:
            return x_BF * self.factor

    module = nn.Sequential(Scale(), model())
    expected = torch.zeros(len(flat(module.parameters())))
    for row in ROWS[:4]:
        gradient = flat(torch.autograd.grad(loss_of(module)([row]), list(module.parameters())))
        expected += gradient * min(1.0, CLIP / gradient.norm().item())
    torch.testing.assert_close(update(module, ROWS[:4]), expected / B, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(7), nn.BatchNorm1d(7, affine=False)])
def test_batch_norm_is_refused(norm: nn.Module) -> None:
    module = nn.Sequential(nn.Linear(5, 7), norm, nn.Linear(7, 3))
    with raises(InputError, Code.MODEL_INVALID, names="batch_norm"):
        training(module)
    check_model(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)).eval())


def test_other_layers_that_mix_rows_are_refused() -> None:
    with raises(InputError, Code.MODEL_INVALID):
        check_model(nn.Sequential(nn.LSTM(5, 3)))


def test_a_row_that_comes_twice_is_refused() -> None:
    module = model()
    dp = training(module)
    with raises(InternalError, Code.INTERNAL):
        dp.step(ROWS[:4], lambda rows: module(torch.cat([X[rows], X[rows]])).mean())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with raises(InternalError, Code.INTERNAL):
        DpTraining(model(), sgd(model()), ROWS, B, noise_multiplier=1.0, max_grad_norm=1.0)


def test_settings_take_either_epsilon_or_noise() -> None:
    settings = DpSettings(epsilon=2.0)
    assert (settings.delta, settings.max_grad_norm, settings.mode) == (1e-5, 1.0, "fixed")
    assert DpSettings(noise_multiplier=0.0).noise_multiplier == 0.0
    wrongs: list[dict[str, Any]] = [
        {},
        {"epsilon": 1.0, "noise_multiplier": 1.0},
        {"epsilon": -1.0},
        {"epsilon": 1.0, "delta": 1.0},
    ]
    for wrong in wrongs:
        with pytest.raises(ValidationError):
            DpSettings(**wrong)
