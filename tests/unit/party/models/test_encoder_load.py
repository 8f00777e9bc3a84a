"""What an encoder computes and keeps: by hand for small ones, and beside torchvision's figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from pydantic import TypeAdapter

from tests.harness import cases
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_party.assembly.trial import try_parties
from vfl_party.forecast.count import encoder_loads, flops, forecast_of
from vfl_party.models import InputSpec, build_encoder


def test_layers_by_hand(tmp_path: Any) -> None:
    tables = cases.recipe(2, model={"embedding_size": 3, "encoder": {"kind": "mlp", "hidden": [7]}})
    recipe = Recipe.model_validate(tables | {"simulate": {"parties": cases.digits(2)}})
    tried = try_parties(recipe, tmp_path)
    name = recipe.passives[0].name
    party = tried[name].party
    width = party.rows.need_features().spec.shape[0]
    before = {key: value.clone() for key, value in party.models["encoder"].state_dict().items()}
    (found,) = encoder_loads(party)
    assert found.party == name
    assert found.rows == len(party.rows.get("local"))
    assert found.weights == width * 7 + 7 + 7 * 3 + 3
    assert found.weight_bytes == 4 * found.weights
    # A multiplication and an addition for each weight; a bias and ReLU are not counted.
    assert found.flops_a_row == 2 * (width * 7 + 7 * 3)
    # The inputs of both layers: ReLU's gradient follows from its outputs.
    assert found.kept_bytes_a_row == 4 * (width + 7)
    after = party.models["encoder"].state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert forecast_of(party, 100).encoders == (found,)


# torchvision's page of each says GFLOPS, of which a multiplication and an addition are one.
@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("resnet18", torchvision.models.ResNet18_Weights.IMAGENET1K_V1),
        ("resnet50", torchvision.models.ResNet50_Weights.IMAGENET1K_V1),
        ("mobilenet_v2", torchvision.models.MobileNet_V2_Weights.IMAGENET1K_V1),
        ("vgg13", torchvision.models.VGG13_BN_Weights.IMAGENET1K_V1),
    ],
)
def test_networks_take_what_torchvision_says(kind: str, weights: Any) -> None:
    settings: EncoderSettings = TypeAdapter(EncoderSettings).validate_python(
        {"kind": kind, "small_images": False}
    )
    with torch.device("meta"):
        encoder = build_encoder(settings, InputSpec((3, 224, 224)), 1000)
        found = flops(encoder, [torch.zeros(1, 3, 224, 224)])
    assert found / 2e9 == pytest.approx(weights.meta["_ops"], rel=0.01)
