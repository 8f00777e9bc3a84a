"""Defences as transforms: noise as their formulas say, private, resumed from a checkpoint, refused
in a sentence.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.methods.splitnn.exchanges import embedding
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.filter import Filter
from vfl_party.outbound.policies import AllowAll
from vfl_party.outbound.transforms import (
    ClippedGaussian,
    ClippedGaussianSettings,
    Marvell,
    MarvellSettings,
    MaxNorm,
    Statistics,
    optimum,
    sigma_of,
    sum_kl,
)


def gradients(
    rows: int = 400, width: int = 6, share: float = 0.25
) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    positive = torch.arange(rows) < share * rows
    g = torch.randn(rows, width, generator=made) * torch.where(positive, 0.5, 0.1)[:, None]
    return g + torch.where(positive, 1.0, -0.3)[:, None] * torch.ones(width), positive


def made(kind: str) -> tuple[Filter, dict[str, torch.Tensor]]:
    """A new defence that has been told what it wants to know."""
    g, positive = gradients()
    filters: dict[str, Filter] = {
        "max_norm": MaxNorm(),
        "marvell": Marvell(MarvellSettings(scale=2.0)),
        "marvell of an error": Marvell(MarvellSettings(error=0.3)),
        "clipped_gaussian": ClippedGaussian(
            ClippedGaussianSettings(clip=1.0, epsilon=1.0, delta=1e-5)
        ),
    }
    filters[kind].tell({"labels": positive.float()[:, None]})
    return filters[kind], {"dz": g}


KINDS = ["max_norm", "marvell", "marvell of an error", "clipped_gaussian"]


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_private_and_goes_on_from_a_checkpoint(kind: str) -> None:
    (first, x), (second, _) = made(kind), made(kind)
    torch.manual_seed(0)
    one = first.apply(x)["dz"]
    torch.manual_seed(0)
    assert not torch.equal(one, second.apply(x)["dz"])
    state = unpack(*pack(first.state()))
    wanted = [first.apply(x)["dz"] for _ in range(2)]
    second.load_state(state)
    assert all(torch.equal(second.apply(x)["dz"], want) for want in wanted)
    assert one.dtype is x["dz"].dtype
    assert one.shape == x["dz"].shape


@pytest.mark.slow
def test_max_norm_makes_all_rows_as_long_on_average() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [-1.0, 0.0]])
    drawn = torch.stack([MaxNorm().noise(g) for _ in range(4000)])
    squares = drawn.pow(2).sum(dim=2).mean(dim=0)
    # The longest row stays.
    assert torch.equal(drawn[:, 0], g[0].expand(4000, 2))
    assert squares.tolist() == pytest.approx([25.0] * 4, rel=0.12)
    assert drawn.mean(dim=0).flatten().tolist() == pytest.approx(g.flatten().tolist(), abs=0.3)
    assert (drawn[:, 1, 0] * 0.4).tolist() == pytest.approx(
        (drawn[:, 1, 1] * 0.3).tolist(), abs=1e-4
    )


@pytest.mark.slow
def test_marvell_has_the_variances_of_its_optimum() -> None:
    g, positive = gradients(rows=80)
    rows = g.double()
    zero, one = rows[~positive], rows[positive]
    delta = one.mean(0) - zero.mean(0)
    u, v = ((part - part.mean(0)).pow(2).mean().item() for part in (zero, one))
    found = Statistics(u, v, delta.pow(2).sum().item(), 0.25, 6)
    best = optimum(found, 2 * found.gap)
    defence = Marvell(MarvellSettings(scale=2.0))
    noise = torch.stack([defence.noise(g, positive) - g for _ in range(3000)]).double()
    unit = delta / delta.norm()
    along = noise @ unit
    across = (noise - along[..., None] * unit).pow(2).sum(dim=2) / 5
    for rows_of, wanted_1, wanted_2 in (
        (~positive, best.along_0, best.across_0),
        (positive, best.along_1, best.across_1),
    ):
        assert along[:, rows_of].pow(2).mean().item() == pytest.approx(wanted_1, rel=0.03)
        assert across[:, rows_of].mean().item() == pytest.approx(wanted_2, rel=0.03, abs=1e-9)
    assert noise.pow(2).sum(dim=2).mean().item() == pytest.approx(2 * found.gap, rel=0.03)


def test_marvell_grows_until_the_error_is_reached() -> None:
    g, positive = gradients()
    defence = Marvell(MarvellSettings(error=0.4))
    defence.noise(g, positive)
    rows = g.double()
    zero, one = rows[~positive], rows[positive]
    u, v = ((part - part.mean(0)).pow(2).mean().item() for part in (zero, one))
    found = Statistics(u, v, (one.mean(0) - zero.mean(0)).pow(2).sum().item(), 0.25, 6)
    s = defence.state()["last"]
    assert s > 1
    assert 0.5 - math.sqrt(sum_kl(found, optimum(found, s * found.gap))) / 4 >= 0.4
    assert 0.5 - math.sqrt(sum_kl(found, optimum(found, s / 1.5 * found.gap))) / 4 < 0.4


def test_a_batch_of_one_class_gets_noise_of_the_same_power_and_equal_means_none() -> None:
    g, defence = torch.full((50, 8), 0.5), Marvell(MarvellSettings(scale=3.0))
    noise = torch.stack(
        [defence.noise(g, torch.zeros(50, dtype=torch.bool)) - g for _ in range(200)]
    )
    assert noise.pow(2).sum(dim=2).mean().item() == pytest.approx(3 * 2.0, rel=0.03)
    half = torch.arange(50) % 2 == 0
    assert torch.equal(defence.noise(g, half), g)


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-3])
def test_the_sigma_is_the_least_of_the_analytic_mechanism(epsilon: float, delta: float) -> None:
    def reached(sigma: float) -> float:
        a, b = 1.5 / sigma, epsilon * sigma / 3.0
        return float(normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b))

    sigma = sigma_of(epsilon, delta, 3.0)
    assert reached(sigma) <= delta * (1 + 1e-6)
    assert reached(sigma * 0.999) > delta


def test_clipping_comes_before_the_noise() -> None:
    defence = ClippedGaussian(ClippedGaussianSettings(clip=2.0, epsilon=1e4, delta=0.4))
    z = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    mean = torch.stack([defence.noise(z) for _ in range(2000)]).mean(dim=0)
    assert mean.flatten().tolist() == pytest.approx([1.2, 1.6, 0.3, 0.4], abs=0.05)


def recipe(task: dict[str, Any], **transform: Any) -> Recipe:
    return Recipe.model_validate(
        cases.recipe(2, task=task, phase={"transforms": [{"exchange": "embedding"} | transform]})
    )


@pytest.mark.parametrize(
    ("task", "transform"),
    [
        (
            {"kind": "multiclass", "classes": 3},
            {"kind": "marvell", "sent_by": "active", "scale": 1.0},
        ),
        ({"kind": "binary"}, {"kind": "marvell", "sent_by": "passive", "scale": 1.0}),
        ({"kind": "binary"}, {"kind": "marvell", "sent_by": "active"}),
    ],
)
def test_what_a_defence_cannot_do_is_one_sentence(
    task: dict[str, Any], transform: dict[str, Any]
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        make_chains(
            recipe(task, **transform),
            "splitnn",
            embedding(SplitNNSettings(epochs=1)),
            "passive",
            AllowAll(),
        )


@pytest.mark.parametrize(
    "kind",
    [{"kind": "iso", "amplifier": 1.0}, {"kind": "max_norm"}, {"kind": "marvell", "scale": 1.0}],
)
def test_noise_of_a_batch_is_refused_for_parts_of_one(kind: dict[str, Any]) -> None:
    """A part of one row has only its own length and class to hide among."""
    given = recipe({"kind": "binary"}, sent_by="active", **kind)
    given.phases[0].settings["micro_batches"] = 4
    with raises(InputError, Code.CONFIG_INVALID, names="micro_batches"):
        make_chains(given, "splitnn", embedding(SplitNNSettings(epochs=1)), "passive", AllowAll())


def test_the_chain_says_what_the_defence_is() -> None:
    asked = recipe({"kind": "binary"}, kind="marvell", sent_by="active", scale=4.0)
    chains = make_chains(
        asked, "splitnn", embedding(SplitNNSettings(epochs=1)), "active", AllowAll()
    )
    assert str(chains.down) == "Marvell noise (s = 4) -> allow all -> identity"
    assert chains.down.knows == {"labels"}
    assert np.isfinite(sigma_of(1.0, 1e-5, 2.0))
