"""MixMatch in model completion: its formulas by hand, its training step by step, and encoders with
a known leak.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.harness.scenes import Scaled, labelled_scene
from vfl_leaks.attacks import completion
from vfl_leaks.attacks.completion import MIXMATCH, compute_baselines, recover_labels
from vfl_party.base.seeds import derive_seed
from vfl_party.base.statistics import auc
from vfl_party.models import seed_torch


@pytest.fixture(autouse=True)
def _half_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do for encoders that have the label, or nothing."""
    monkeypatch.setattr(completion, "_STEPS", 512)


def test_a_guess_is_sharpened_and_rows_are_mixed_by_hand() -> None:
    powers = [0.8**1.25, 0.2**1.25]
    found = completion.sharpen(torch.tensor([[0.8, 0.2]]).log())
    assert found[0].tolist() == pytest.approx([power / sum(powers) for power in powers])
    rows = torch.tensor([[0.0, 1.0], [4.0, 3.0]])
    assert completion.mix(rows, 0.75, torch.tensor([1, 0])).tolist() == [[1.0, 1.5], [3.0, 2.5]]


def test_the_loss_is_cross_entropy_and_weighted_squared_error() -> None:
    logits = torch.tensor([[0.9, 0.1], [0.6, 0.4]]).log()
    targets = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    by_hand = -(np.log(0.9) + np.log(0.1)) / 2 + 7.0 * (0.5**2 + 0.5**2) / 2
    assert completion.mixmatch_loss(logits, targets, 1, 7.0).item() == pytest.approx(by_hand)


@pytest.mark.parametrize("codes", [False, True])
def test_training_is_that_of_the_formulas(codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, written out. With codes of categories beside the numbers, embeddings are mixed
    instead of inputs.
    """
    monkeypatch.setattr(completion, "_STEPS", 3)
    x, y = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3

    def inputs(rows: slice) -> tuple[torch.Tensor, ...]:
        return (x[rows], torch.zeros(len(x[rows]), 1, dtype=torch.int64)) if codes else (x[rows],)

    class Two(Scaled):
        def forward(self, x: torch.Tensor, codes: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) + (0 if codes is None else codes)

    encoder = Two(4)
    known, others, judged = inputs(slice(20)), inputs(slice(20, 150)), inputs(slice(150, 200))
    got = completion.train_mixmatch(encoder, known, y, others, judged, 3, 5)
    # A copy was trained.
    assert encoder.factor.item() == 1.0

    with seed_torch(derive_seed(5, "init", "mixmatch")):
        head = nn.Linear(4, 3)
    factor = nn.Parameter(torch.tensor(1.0))
    mean, std = x[:20].mean(0), x[:20].std(0)
    weights = [*head.parameters(), factor]
    averages = [each.detach().clone() for each in weights]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    random = np.random.default_rng(derive_seed(5, "mixmatch"))
    for step in range(3):
        few, many = random.choice(20, 16, replace=False), random.choice(130, 16, replace=False)
        p = torch.softmax(head((factor * x[20:150][many] - mean) / std), dim=1).detach() ** (
            1 / 0.8
        )
        targets = torch.cat([functional.one_hot(y[few], 3), p / p.sum(dim=1, keepdim=True)])
        share = random.beta(0.75, 0.75)
        share, order = max(share, 1 - share), random.permutation(32)
        rows = torch.cat([x[:20][few], x[20:150][many]])
        rows, targets = (share * each + (1 - share) * each[order] for each in (rows, targets))
        logits = head((factor * rows - mean) / std)
        known_loss = -(targets[:16] * torch.log_softmax(logits[:16], dim=1)).sum(dim=1).mean()
        other_loss = ((torch.softmax(logits[16:], dim=1) - targets[16:]) ** 2).mean()
        optimizer.zero_grad()
        (known_loss + 50 * step / 3 * other_loss).backward()
        optimizer.step()
        for average, each in zip(averages, weights, strict=True):
            average.mul_(0.99).add_(0.01 * each.detach())
    want = ((averages[2] * x[150:] - mean) / std) @ averages[0].T + averages[1]
    assert (got - want).abs().max().item() < 1e-6


@pytest.mark.parametrize("informed", [True, False])
def test_completion_by_mixmatch_finds_what_is_in_the_encoder_and_nothing_else(
    informed: bool,
) -> None:
    scene = labelled_scene(informed)
    truth = scene.labels[scene.rows["test"]].numpy() == 1
    found, beside = (
        recover_labels(scene)[MIXMATCH],
        compute_baselines(scene)["from scratch, MixMatch"],
    )
    value, alone = (auc((each[:, 1] - each[:, 0]).numpy(), truth) for each in (found, beside))
    assert abs(alone - 0.5) < 0.06
    assert value > 0.95 if informed else value == pytest.approx(alone, abs=0.05)


def test_the_given_encoder_stays_as_it_is() -> None:
    scene = labelled_scene(True)
    assert scene.encoder is not None
    before = copy.deepcopy(scene.encoder.state_dict())
    recover_labels(scene)
    assert all(torch.equal(before[name], each) for name, each in scene.encoder.state_dict().items())
