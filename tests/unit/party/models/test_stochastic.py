"""Encoders that draw their embeddings: what is drawn, what is added to the loss, and what they
refuse.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.assembly.party import assemble, expect_rows, open_party
from vfl_party.models import InputSpec, StochasticEncoder, deterministic
from vfl_party.ranks import check_spread


def some(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def an_encoder(weight: float = 0.1) -> StochasticEncoder:
    return StochasticEncoder(nn.Identity(), 3, weight)


def test_embeddings_have_the_mean_and_the_spread_that_the_encoder_gives() -> None:
    both = some(1, 6).expand(20_000, 6)
    z = an_encoder()(both)
    sigma = 0.1 + torch.log(1 + torch.exp(both[0, 3:] - 0.5))
    assert (z.mean(0) - both[0, :3]).abs().max().item() < 0.03
    assert (z.std(0) / sigma - 1).abs().max().item() < 0.03


@pytest.mark.parametrize("training", [True, False])
def test_the_noise_is_the_same_for_the_same_batch_and_another_for_any_other(training: bool) -> None:
    encoder, x = an_encoder().train(training), some(8, 6)
    z = encoder(x)
    assert torch.equal(encoder(x.clone()), z)
    other = x.clone()
    other[7, 0] += 1e-6
    # Of every row, though they are the same.
    assert (encoder(other)[:7] - z[:7]).abs().min().item() > 0.0
    resumed = an_encoder().train(training)
    resumed.load_state_dict(encoder.state_dict())
    assert torch.equal(resumed(x), z)
    # Another party's secret.
    assert not torch.equal(an_encoder().train(training)(x), z)


def test_the_loss_gets_kl_in_training_alone() -> None:
    x, dz = some(8, 6).requires_grad_(), some(8, 3, seed=2)
    encoder = an_encoder(0.25).train()
    encoder(x).backward(dz)
    assert x.grad is not None
    got, x.grad = x.grad, None
    z = encoder.eval()(x)
    z.backward(dz)
    plain, x.grad = x.grad, None
    mean, s = x.chunk(2, dim=1)
    sigma = 0.1 + torch.log(1 + torch.exp(s - 0.5))
    kl = kl_divergence(Normal(mean, sigma), Normal(torch.zeros(()), torch.ones(()))).sum() / 8
    (0.25 * kl).backward()
    assert x.grad is not None
    assert (got - plain - x.grad).abs().max().item() < 1e-6
    assert x.grad.abs().max().item() > 0.01


def test_the_owner_sees_the_mean() -> None:
    x, inner = some(4, 6), nn.Linear(6, 6)
    encoder = StochasticEncoder(inner, 3, 0.1)
    assert torch.equal(deterministic(encoder)(x), inner(x)[:, :3])
    assert deterministic(inner) is inner


PASSIVE = cases.columns("sklearn:breast_cancer", 3, limit=60)["p1"]


def assembled(name: str, phase: dict[str, object]) -> nn.Module:
    made = Recipe.model_validate(cases.recipe(3, task={"kind": "binary"}, phase=phase))
    data = DataSettings.model_validate(cases.columns("sklearn:breast_cancer", 3, limit=60)[name])
    opened = open_party(made, name, data, made.model.encoder)
    return assemble(opened, expect_rows(opened)).party.models["encoder"]


def test_passive_parties_draw_and_the_active_party_does_not() -> None:
    phase: dict[str, object] = {"epochs": 1, "batch_size": 20, "mid": 0.1}
    found = assembled("p1", phase)
    assert isinstance(found, StochasticEncoder)
    assert found.weight == 0.1
    assert not isinstance(assembled("p0", phase), StochasticEncoder)


def test_phases_that_ask_for_other_encoders_are_refused() -> None:
    first = {"kind": "splitnn", "name": "one", "epochs": 1, "batch_size": 20}
    recipe = cases.recipe(3, task={"kind": "binary"})
    for earlier, later in ((0.1, 0.0), (0.1, 0.2), (0.0, 0.2)):
        tables = recipe | {
            "phases": [first | {"mid": earlier}, first | {"name": "two", "mid": later}]
        }
        made = Recipe.model_validate(tables)
        data = DataSettings.model_validate(PASSIVE)
        opened = open_party(made, "p1", data, made.model.encoder)
        with raises(InputError, Code.CONFIG_INVALID, names="p1"):
            assemble(opened, expect_rows(opened))


def test_several_processes_of_a_party_are_refused() -> None:
    encoder = assembled("p1", {"epochs": 1, "batch_size": 20, "mid": 0.1})
    with raises(InputError, Code.MODEL_INVALID, names="p1"):
        check_spread(encoder, InputSpec((10,)), torch.device("cpu"), "p1")


def test_a_run_that_begins_anew_keeps_its_secret(tmp_path: Path) -> None:
    first, again, x = an_encoder(), an_encoder(), some(8, 6)
    first.keep_secret(tmp_path / "secret")
    again.keep_secret(tmp_path / "secret")
    assert torch.equal(again(x), first(x))
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "secret").write_bytes(b"short")
    with raises(InputError, Code.FILE_INVALID, names="32"):
        an_encoder().keep_secret(tmp_path / "secret")


def test_rows_far_from_the_others_have_noise_and_finite_gradients() -> None:
    x = torch.tensor([[3.0, -2.0, 1.0, -1e4, -200.0, -100.0]] * 400, requires_grad=True)
    encoder = an_encoder().train()
    z = encoder(x)
    assert (z - x[:, :3]).std(dim=0).min().item() > 0.05
    z.backward(torch.ones_like(z))
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_what_leaves_says_that_it_is_drawn_wherever_embeddings_leave() -> None:
    tables = cases.recipe(
        2, task={"kind": "binary"}, phase={"epochs": 1, "batch_size": 20, "mid": 0.1}
    )
    made = Recipe.model_validate(tables | {"phases": [*tables["phases"], {"kind": "evaluate"}]})
    opened = open_party(made, "p1", DataSettings.model_validate(PASSIVE), made.model.encoder)
    leaves = assemble(opened, expect_rows(opened)).leaves
    said = {
        (each.phase, each.exchange): each.how
        for each in leaves
        if each.sent.startswith("embedding")
    }
    assert said == dict.fromkeys(
        [("splitnn", "embedding"), ("splitnn", "validation"), ("evaluate", "embedding")],
        "drawn by MID, λ = 0.1",
    )
