"""A network that is cut in two, and rows that each party has of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.config.data import DataSettings
from vfl_common.config.models import NETWORKS, CnnSettings, MlpSettings, NetworkSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.align.aligned import AlignmentContext
from vfl_party.align.own_rows import _read_holding
from vfl_party.assembly.party import expect_rows, open_party
from vfl_party.data import Table, load_table
from vfl_party.models import seed_torch
from vfl_party.models.halves import Bottleneck, Halves
from vfl_party.models.networks import StandardisedConv, group_norm

TABLE = Table("file.csv", ("1",))
ALIGNING = AlignmentContext("p3", "run", TABLE, Path(), cast("Any", None), peer_rows_at_most=100)

CNN = CnnSettings(kind="cnn", channels=(8, 12, 16, 20))
RESNET = NetworkSettings(kind="resnet18")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cut", "neck", "latent", "features"),
    [
        (CNN, 1, None, (8, 16, 16), 20),
        (CNN, 3, None, (16, 4, 4), 20),
        (CNN, 3, Bottleneck(4, 2), (4, 2, 2), 20),
        (RESNET, 1, None, (64, 32, 32), 512),
        # C4S2: 4 KiB instead of 256 KiB an image.
        (RESNET, 3, Bottleneck(4, 2), (4, 16, 16), 512),
        (NetworkSettings(kind="resnet18", small_images=False), 1, None, (64, 8, 8), 512),
        (NetworkSettings(kind="resnet50", small_images=False), 4, None, (256, 8, 8), 2048),
        (NetworkSettings(kind="mobilenet_v2"), 6, Bottleneck(4, 2), (4, 16, 16), 1280),
        (NetworkSettings(kind="mobilenet_v2", small_images=False), 6, None, (24, 8, 8), 1280),
        (NetworkSettings(kind="vgg13"), 3, None, (128, 16, 16), 512),
    ],
)
def test_halves_fit_together(
    settings: Any, cut: int, neck: Bottleneck | None, latent: tuple[int, int, int], features: int
) -> None:
    halves = Halves(settings, (3, 32, 32), cut, neck)
    before = torch.get_rng_state()
    assert (halves.latent, halves.features) == (latent, features)
    assert torch.equal(torch.get_rng_state(), before)
    with seed_torch(1):
        # A deep network makes much of a rounding.
        bottom, tail = halves.bottom().double(), halves.tail(24).double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    z = bottom(x)
    assert z.shape[1:] == latent == tail.latent
    assert tail.features(z).shape == (2, features)
    assert tail(z).shape == (2, 24)
    # No row depends on another.
    alone = tail(bottom(x[:1]))
    assert torch.allclose(alone, tail(z)[:1], atol=1e-5)


SIZES = [(1, 1), (1, 9), (2, 3), (5, 7), (33, 18)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("neck", [None, Bottleneck(2, 2), Bottleneck(3, 3)], ids=str)
@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        (CNN, 1),
        (CNN, 3),
        (CnnSettings(kind="cnn", channels=(1, 1, 1)), 1),
        (CnnSettings(kind="cnn", channels=(3, 1)), 1),
        (RESNET, 5),
        (NetworkSettings(kind="resnet18", small_images=False), 3),
        (NetworkSettings(kind="mobilenet_v2"), 3),
        (NetworkSettings(kind="vgg13"), 2),
    ],
    ids=str,
)
def test_sizes_are_those_of_the_network(
    settings: Any, cut: int, neck: Bottleneck | None, size: tuple[int, int]
) -> None:
    halves = Halves(settings, (2, *size), cut, neck)
    with seed_torch(1):
        bottom, tail = halves.bottom(), halves.tail(4)
    x = torch.randn(1, 2, *size)
    if halves.fits:
        z = bottom(x)
        assert z.shape[1:] == halves.latent
        tail(z)
    else:
        with raises(ValueError):
            tail(bottom(x))


@pytest.mark.parametrize("kind", NETWORKS)
def test_halves_have_the_weights_of_torchvisions_network(kind: Any) -> None:
    """But for the last layers, and for VGG's biases, which a normalisation follows."""
    settings = NetworkSettings(kind=kind, small_images=False)
    halves = Halves(settings, (3, 64, 64), 1)
    with seed_torch(1):
        bottom, tail = halves.bottom(), halves.tail(4)
    with torch.device("meta"):
        whole = getattr(torchvision.models, "vgg13_bn" if kind == "vgg13" else kind)()
    body = whole.features if hasattr(whole, "features") else whole
    wanted = sorted(
        tuple(each.shape) for name, each in body.named_parameters() if not name.startswith("fc.")
    )
    convolutions = [each for each in body.modules() if isinstance(each, nn.Conv2d)]
    for shape in (tuple(each.bias.shape) for each in convolutions if each.bias is not None):
        wanted.remove(shape)
    ours = [*bottom.parameters(), *tail.body.parameters()]
    assert sorted(tuple(each.shape) for each in ours) == wanted


def test_a_standardised_convolution() -> None:
    """By its definition (Qiao et al. 2019), channel by channel."""
    conv = StandardisedConv(3, 4, 3, padding=1, bias=False)
    with torch.no_grad():
        # Scale and mean of a channel's weights have no effect.
        conv.weight.mul_(7).add_(3)
    x, rows = torch.randn(2, 3, 5, 5), list[Tensor]()
    for weight in conv.weight:
        centred = weight - weight.mean()
        rows.append(centred / (centred.pow(2).mean() + 1e-5).sqrt())
    assert torch.allclose(conv(x), functional.conv2d(x, torch.stack(rows), padding=1), atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "groups"), [(64, 16), (4, 1), (3, 1), (14, 2), (10, 2), (1, 1)]
)
def test_four_channels_a_group_if_that_is_even(channels: int, groups: int) -> None:
    assert group_norm(channels).num_groups == groups


@pytest.mark.parametrize(
    ("settings", "cut"),
    [(CNN, 4), (RESNET, 2), (CnnSettings(kind="cnn", channels=(8,)), 1), (MlpSettings(), 1)],
)
def test_a_cut_that_is_not_possible(settings: Any, cut: int) -> None:
    with raises(InputError, Code.MODEL_INVALID):
        Halves(settings, (3, 32, 32), cut).bottom()


# -- rows of each party's own


def own_rows(**changes: Any) -> dict[str, Any]:
    tables = cases.own_rows_recipe(2)
    return tables | {"rows": tables["rows"] | changes}


@pytest.mark.parametrize(
    "change",
    [
        {"aligned": 0.5},
        {"labelled": 5},
        {"split": "stratified"},
        {"at_least": 5},
        {"at_least": 0.5},
    ],
)
def test_a_recipe_that_needs_common_rows(change: dict[str, Any]) -> None:
    with raises(ValueError):
        Recipe.model_validate(own_rows(**change))


def test_the_active_party_has_labels_alone() -> None:
    tables = own_rows()
    tables["parties"][0]["features"] = True
    with raises(ValueError):
        Recipe.model_validate(tables)


@pytest.mark.parametrize("counts", [[0, 1, 1], [-1, 5, 5], [5, -5, 1]])
def test_a_number_of_rows_that_makes_no_sense(counts: list[int]) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1", "p2")):
        _read_holding(ALIGNING, "p1", "p2", counts)


@pytest.mark.parametrize("sender", ["p1", "p2"])
@pytest.mark.parametrize("counts", [[101, 0, 0], [40, 40, 21], [1 << 31] * 3])
def test_more_rows_than_a_party_takes(counts: list[int], sender: str) -> None:
    with raises(PeerError, Code.REFUSED, names=("peer_rows_at_most", "p2")):
        _read_holding(ALIGNING, sender, "p2", counts)
    # Its own are known to it.
    assert _read_holding(ALIGNING, sender, "p3", counts)["local"] == counts[0]
    assert _read_holding(ALIGNING, sender, "p2", [40, 40, 20])["test"] == 20


def test_every_nth_row(tmp_path: Any) -> None:
    data = cases.own_rows(3, limit=20)
    found = {
        name: load_table(DataSettings(**data[name]), with_label=False).ids
        for name in ("p1", "p2", "p3")
    }
    assert sorted(each for ids in found.values() for each in ids) == [
        f"{row:04d}" for row in range(20)
    ]
    assert [len(ids) for ids in found.values()] == [7, 7, 6]
    few = DataSettings(**cases.own_rows(5, limit=3)["p5"])
    with raises(InputError, Code.DATA_INVALID, names="data.view"):
        load_table(few, with_label=False)


@pytest.mark.parametrize("label", [None, "digit"])
def test_a_passive_party_divides_its_rows_by_its_own_column(
    label: str | None, tmp_path: Any
) -> None:
    rows = "".join(f"{row},{'test' if row % 4 == 0 else 'train'},{row % 3}\n" for row in range(12))
    (tmp_path / "rows.csv").write_text("who,part,digit\n" + rows)
    made = Recipe.model_validate(own_rows(split="column"))
    data = DataSettings(
        source=str(tmp_path / "rows.csv"), id=("who",), split="part", label=label, scale="minmax"
    )
    opened = open_party(made, "p1", data, made.model.encoder)
    assert opened.table.labels is None
    assert expect_rows(opened).holdings["p1"] == {"local": 9, "validation": 0, "test": 3}
    with raises(InputError, Code.DATA_INVALID, names=("parts", "rows.csv")):
        open_party(made, "p1", data.model_copy(update={"split": "parts"}), made.model.encoder)
