"""Distance correlation: by its definition, where it is known, and what its gradient does."""

from __future__ import annotations

import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.reference_defences import dcor
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_party.assembly.party import assemble, expect_rows, open_party
from vfl_party.methods.splitnn import METHOD
from vfl_party.methods.splitnn.exchanges import (
    add_label_gradients,
    encode_columns,
    encode_labels,
    log_dcor,
    log_dcor_gradient,
)


def some(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_value_and_its_gradient_are_those_of_the_definition() -> None:
    z, x = some(12, 3), some(12, 5, seed=2)
    exact = z.double().requires_grad_()
    wanted = dcor(0.7)(exact, x.double())
    wanted.backward()
    assert 0.7 * log_dcor(z, x).item() == pytest.approx(wanted.item(), abs=1e-6)
    assert exact.grad is not None
    assert (log_dcor_gradient(z, x, 0.7).double() - exact.grad).abs().max().item() < 1e-6


def test_equal_up_to_turning_and_scale_is_one_and_independent_is_small() -> None:
    x = some(400, 4)
    turned = 3.0 * x @ torch.linalg.qr(some(4, 4, seed=3)).Q
    assert log_dcor(turned, x).exp().item() == pytest.approx(1.0, abs=1e-5)
    # Biased: not 0 in 400 rows.
    assert log_dcor(some(400, 4, seed=4), x).exp().item() < 0.25


def test_the_gradient_lowers_it() -> None:
    x = some(100, 4)
    # At x itself it is largest, so that there is no gradient.
    start = x + 0.1 * some(100, 4, seed=5)
    z = start.clone()
    for _ in range(100):
        z -= 5.0 * log_dcor_gradient(z, x, 1.0)
    assert log_dcor(z, x).item() < log_dcor(start, x).item() - 0.05


def test_equal_embeddings_have_no_gradient() -> None:
    assert log_dcor_gradient(torch.ones(6, 2), some(6, 3), 1.0).abs().max().item() == 0.0


def test_categories_count_as_different_or_equal() -> None:
    found = encode_columns((some(3, 2), torch.tensor([[0, 2], [1, 2], [0, 1]])))
    assert found.shape == (3, 2 + 2 * 3)
    assert (found[0, 2:] - found[1, 2:]).norm().item() == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    "other", [{"in_flight": 2}, {"local_updates": 2}, {"micro_batches": 2}, {"cache": {}}]
)
@pytest.mark.parametrize("defence", ["nopeek", "dcor", "mid"])
def test_it_is_refused_where_a_batch_is_not_whole(defence: str, other: dict[str, object]) -> None:
    with raises((InputError, ValueError), names=("in_flight", "micro_batches")):
        METHOD.settings.model_validate({"epochs": 1, defence: 1.0, **other})


def test_classes_are_equal_or_different_and_numbers_have_distances() -> None:
    classes = encode_labels(torch.tensor([0, 2, 2]))
    assert (torch.cdist(classes, classes) ** 2).round().tolist() == [
        [0, 2, 2],
        [2, 0, 0],
        [2, 0, 0],
    ]
    numbers = encode_labels(torch.tensor([0.5, 2.0]))
    assert numbers.tolist() == [[0.5], [2.0]]


def test_each_party_gets_the_gradient_of_its_own_embeddings() -> None:
    z, dz, y = (
        {"p1": some(12, 3), "p2": some(12, 2, seed=2)},
        some(12, 3, seed=3),
        torch.arange(12) % 3,
    )
    found = add_label_gradients({"p1": dz, "p2": torch.zeros(12, 2)}, z, y, 0.7)
    assert torch.equal(found["p1"], dz + log_dcor_gradient(z["p1"], encode_labels(y), 0.7))
    assert torch.equal(found["p2"], log_dcor_gradient(z["p2"], encode_labels(y), 0.7))
    assert found["p2"].abs().max().item() > 0.0


def test_a_batch_of_one_class_has_no_gradient() -> None:
    z = {"p1": some(6, 2)}
    assert (
        add_label_gradients({"p1": torch.zeros(6, 2)}, z, torch.ones(6), 1.0)["p1"]
        .abs()
        .max()
        .item()
        == 0.0
    )


def test_it_goes_with_noise_on_gradients() -> None:
    transform = {"kind": "marvell", "exchange": "embedding", "sent_by": "active", "scale": 1.0}
    phase = {"epochs": 1, "batch_size": 20, "dcor": 0.1, "transforms": [transform]}
    recipe = Recipe.model_validate(cases.recipe(2, task={"kind": "binary"}, phase=phase))
    data = DataSettings.model_validate(cases.columns("sklearn:breast_cancer", 2, limit=60)["p0"])
    opened = open_party(recipe, "p0", data, recipe.model.encoder)
    assert assemble(opened, expect_rows(opened)).phases
