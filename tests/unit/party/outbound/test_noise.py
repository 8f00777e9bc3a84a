"""ISO and Gaussian noise: as strong as asked for, private, and resumed from a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from vfl_common.config.recipe import Recipe
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.outbound.transforms import GaussianNoise, IsoNoise
from vfl_party.phases.course import Course


@pytest.mark.parametrize("shape", [(256, 64), (64, 4, 8, 8), (5000,)])
@pytest.mark.parametrize("amplifier", [1.0, 5.0])
def test_noise_is_as_strong_as_the_longest_row(shape: tuple[int, ...], amplifier: float) -> None:
    d = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    d[0] = 3 * d[0]
    rows = d.reshape(1, -1) if d.dim() == 1 else d.flatten(1)
    sigma = amplifier * rows.norm(dim=1).max().item() / math.sqrt(rows.shape[1])
    noise = IsoNoise(amplifier).noise(d) - d
    assert noise.shape == d.shape
    n = d.numel()
    # Six standard errors.
    assert noise.std().item() == pytest.approx(sigma, rel=6 / math.sqrt(2 * n))
    assert abs(noise.mean().item()) < 6 * sigma / math.sqrt(n)
    kurtosis = (noise / sigma).pow(4).mean().item()
    # Of a Gaussian.
    assert kurtosis == pytest.approx(3, abs=6 * math.sqrt(96 / n))


def test_an_amplifier_of_zero_changes_nothing() -> None:
    d = torch.randn(3, 4)
    assert IsoNoise(0.0).noise(d) is d


def test_noise_keeps_the_dtype_and_drops_the_graph() -> None:
    d = torch.randn(3, 4, dtype=torch.float16, requires_grad=True)
    noisy = IsoNoise(1.0).noise(d)
    assert noisy.dtype is torch.float16
    assert not noisy.requires_grad


def test_two_instances_differ_whatever_the_seed() -> None:
    d = torch.ones(4, 4)
    torch.manual_seed(0)
    first = IsoNoise(1.0).noise(d)
    torch.manual_seed(0)
    assert not torch.equal(first, IsoNoise(1.0).noise(d))


def test_noise_goes_on_from_a_checkpoint() -> None:
    first, second, d = IsoNoise(1.0), IsoNoise(1.0), torch.randn(5, 7)
    first.noise(d)
    state = unpack(*pack(first.state()))
    expected = [first.noise(d), first.noise(d)]
    second.load_state(state)
    assert all(torch.equal(second.noise(d), wanted) for wanted in expected)


# -- Gaussian noise on uploads


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
