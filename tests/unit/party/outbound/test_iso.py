"""ISO noise: as strong as the paper says, private, and resumed from a checkpoint."""

from __future__ import annotations

import math

import pytest
import torch

from vfl_party.base.checkpoint import pack, unpack
from vfl_party.outbound.transforms import IsoNoise


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
