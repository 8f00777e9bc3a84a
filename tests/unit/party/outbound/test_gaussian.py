"""Noise on uploaded representations: its size, and that nobody can draw it again."""

from __future__ import annotations

import torch

from vfl_common.config.recipe import Recipe
from vfl_party.outbound.transforms import GaussianNoise
from vfl_party.phases.course import Course


def test_noise_has_the_standard_deviation_asked_for_whatever_the_values() -> None:
    r = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0)) * 50
    added = GaussianNoise(0.5).noise(r) - r
    assert abs(added.std().item() - 0.5) < 0.01
    assert abs(added.mean().item()) < 0.01
    assert added.dtype == torch.float32


def test_no_noise_is_the_tensor_itself_and_two_draws_differ() -> None:
    r = torch.zeros(5, 3, requires_grad=True)
    assert GaussianNoise(0.0).noise(r) is r
    torch.manual_seed(0)
    first = GaussianNoise(1.0).noise(r)
    torch.manual_seed(0)
    assert not torch.equal(first, GaussianNoise(1.0).noise(r))
    assert not first.requires_grad


def test_evaluation_and_prediction_have_the_noise_of_the_upload() -> None:
    tables = {
        "name": "noise",
        "task": {"kind": "binary"},
        "parties": [{"name": "active", "role": "active"}, {"name": "passive", "role": "passive"}],
        "model": {"embedding_size": 3},
    }
    head = {"kind": "head", "epochs": 1}
    r = torch.zeros(4000, 3)
    for phases, sigma in (([head], 0.0), ([head | {"noise": 0.3}, {"kind": "evaluate"}], 0.3)):
        noise = GaussianNoise(Course(Recipe.model_validate(tables | {"phases": phases})).sent_noise)
        assert abs(noise.noise(r).std().item() - sigma) < 0.01
