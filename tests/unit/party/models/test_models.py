"""Encoders, top models, combination: shapes, seeds, gradients by hand, and every refusal in one
sentence.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.models import (
    CnnSettings,
    Combine,
    CustomSettings,
    EncoderSettings,
    MlpSettings,
    NetworkSettings,
    TabularSettings,
    TopSettings,
)
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import SECRET, derive_seed, secret_seed
from vfl_party.models import (
    CombinedEmbeddings,
    InputSpec,
    build_checked_encoder,
    build_encoder,
    build_top,
    combine,
    combine_widths,
    generator,
    seed_torch,
)
from vfl_party.models.training import backward

FLAT, IMAGE, MIXED = InputSpec((5,)), InputSpec((1, 9, 9)), InputSpec((3,), (4, 2))
FITTING = [
    (
        {"kind": "mlp", "hidden": [7, 6], "batch_norm": True, "dropout": 0.5, "activation": "gelu"},
        FLAT,
    ),
    ({"kind": "mlp", "hidden": []}, IMAGE),
    ({"kind": "tabular", "hidden": [7], "batch_norm": True, "dropout": 0.1}, MIXED),
    ({"kind": "tabular"}, FLAT),
    ({"kind": "tabular"}, InputSpec((0,), (4, 2))),
    ({"kind": "cnn", "channels": [4, 4, 4, 4, 4]}, IMAGE),
    ({"kind": "cnn", "channels": [4], "batch_norm": False}, InputSpec((3, 1, 8))),
    ({"kind": "mlp", "normed_output": True}, FLAT),
    ({"kind": "cnn0"}, IMAGE),
    ({"kind": "cnn0", "dropout": 0.0, "hidden": []}, InputSpec((3, 6, 7))),
    ({"kind": "cnn1", "hidden": [5]}, InputSpec((2, 14, 15))),
    ({"kind": "resnet18"}, IMAGE),
    ({"kind": "resnet50"}, IMAGE),
    ({"kind": "mobilenet_v2"}, IMAGE),
    ({"kind": "vgg13"}, IMAGE),
]


def settings(values: dict[str, object]) -> EncoderSettings:
    parsed: EncoderSettings = TypeAdapter(EncoderSettings).validate_python(values)
    return parsed


def rows(spec: InputSpec, n: int = 4) -> list[torch.Tensor]:
    inputs = [torch.randn(n, *spec.shape)]
    if spec.cardinalities:
        inputs.append(torch.stack([torch.randint(c, (n,)) for c in spec.cardinalities], dim=1))
    return inputs


@pytest.mark.slow
@pytest.mark.parametrize(("values", "spec"), FITTING)
def test_an_encoder_gives_the_embedding_and_trains_every_parameter(
    values: dict[str, object], spec: InputSpec
) -> None:
    encoder = build_checked_encoder(settings(values), spec, 6, party="hospital")
    assert encoder.training
    z_BD = encoder(*rows(spec))
    assert z_BD.shape == (4, 6)
    z_BD.square().sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(("values", "spec"), FITTING)
def test_a_seed_decides_the_weights_and_the_generator_stays(
    values: dict[str, object], spec: InputSpec
) -> None:
    before = torch.get_rng_state()
    states = []
    for seed in (1, 1, 2**63 - 1):
        # Whatever was drawn before.
        torch.rand(seed % 5)
        with seed_torch(seed):
            states.append(build_encoder(settings(values), spec, 6).state_dict())
    torch.set_rng_state(before)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    with seed_torch(3):
        torch.rand(5)
    assert torch.equal(before, torch.get_rng_state())


def test_the_check_leaves_generator_and_batch_norm_as_they_were() -> None:
    encoder_settings = MlpSettings(batch_norm=True, dropout=0.5)
    with seed_torch(1):
        plain, after_plain = build_encoder(encoder_settings, FLAT, 6), torch.get_rng_state()
    with seed_torch(1):
        checked, after_checked = (
            build_checked_encoder(encoder_settings, FLAT, 6, party="a"),
            torch.get_rng_state(),
        )
    assert torch.equal(after_plain, after_checked)
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), checked.state_dict().values(), strict=True)
    )


def test_layers_are_those_of_the_settings() -> None:
    encoder = build_encoder(
        MlpSettings(hidden=(7,), activation="tanh", batch_norm=True, dropout=0.5), FLAT, 6
    )
    assert [type(m).__name__ for m in encoder.children()] == [
        "Flatten",
        "Linear",
        "BatchNorm1d",
        "Tanh",
        "Dropout",
        "Linear",
    ]
    assert [type(m).__name__ for m in build_top(TopSettings(), 12, 3).children()] == ["Linear"]
    top = build_top(TopSettings(hidden=(8,)), 12, 3)
    assert [type(m).__name__ for m in top.children()] == ["Linear", "ReLU", "Linear"]
    assert top(torch.zeros(2, 12)).shape == (2, 3)


def test_categories_have_a_table_a_column() -> None:
    encoder = build_encoder(TabularSettings(kind="tabular", hidden=(), category_size=2), MIXED, 7)
    with torch.no_grad():
        encoder.mlp[0].weight.copy_(torch.eye(7))  # type: ignore[union-attr, index]
        encoder.mlp[0].bias.zero_()  # type: ignore[union-attr, index]
    table = encoder.get_parameter("table.weight")
    x_BF, categories_BK = torch.randn(2, 3), torch.tensor([[3, 0], [0, 1]])
    expected = torch.stack(
        [torch.cat([x_BF[0], table[3], table[4]]), torch.cat([x_BF[1], table[0], table[5]])]
    )
    torch.testing.assert_close(encoder(x_BF, categories_BK), expected)


def test_resnet18_has_the_stem_of_its_settings() -> None:
    small = build_encoder(NetworkSettings(kind="resnet18"), IMAGE, 6)
    assert small.conv1.stride == (1, 1)
    assert isinstance(small.maxpool, nn.Identity)
    large = build_encoder(
        NetworkSettings(kind="resnet18", small_images=False), InputSpec((4, 64, 64)), 6
    )
    assert large.conv1.weight.shape == (64, 4, 7, 7)  # type: ignore[union-attr]
    assert isinstance(large.maxpool, nn.MaxPool2d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "features", "weights"),
    # torchvision's pages say how many weights a network for 1,000 classes has.
    [
        ("resnet18", 512, 11_689_512),
        ("resnet50", 2048, 25_557_032),
        ("mobilenet_v2", 1280, 3_504_872),
        ("vgg13", 4096, 133_053_736),
    ],
)
def test_networks_have_the_weights_of_torchvision_and_can_end_below_the_last_layer(
    kind: str, features: int, weights: int
) -> None:
    spec = InputSpec((3, 64, 64))
    with torch.device("meta"):
        whole = build_encoder(settings({"kind": kind, "small_images": False}), spec, 1000)
        bare = {"kind": kind, "small_images": False, "last_layer": False}
        below = build_encoder(settings(bare), spec, features)
    assert sum(each.numel() for each in whole.parameters()) == weights
    assert sum(each.numel() for each in below.parameters()) == weights - (features + 1) * 1000
    assert below(torch.zeros(2, *spec.shape, device="meta")).shape == (2, features)
    with (
        raises(InputError, Code.MODEL_INVALID, names=("model.encoder", "embedding_size")),
        torch.device("meta"),
    ):
        build_encoder(settings(bare), spec, 100)


def test_the_networks_of_fedonce_have_the_weights_of_their_layers() -> None:
    """Of a quarter of MNIST: 14 x 14, as the paper divides it."""
    quarter, sizes = InputSpec((1, 14, 14)), []
    for kind in ("cnn0", "cnn1"):
        encoder = build_encoder(settings({"kind": kind}), quarter, 3)
        sizes.append([tuple(each.shape) for each in encoder.parameters() if each.dim() > 1])
    # 14 - 2 - 2 = 10, pooled 5.
    assert sizes[0] == [(32, 1, 3, 3), (64, 32, 3, 3), (128, 64 * 5 * 5), (3, 128)]
    # 14 / 2 = 7, pooled 6, (6 - 4) / 2 + 1 = 2, pooled 1.
    assert sizes[1] == [(16, 1, 8, 8), (32, 16, 4, 4), (3, 32)]


def test_the_mlp_of_fedhssls_code_ends_with_norm_and_relu() -> None:
    encoder = build_encoder(MlpSettings(hidden=(7,), normed_output=True), FLAT, 6)
    assert [type(each).__name__ for each in encoder.children()] == [
        "Flatten",
        "Linear",
        "ReLU",
        "Linear",
        "BatchNorm1d",
        "ReLU",
    ]
    assert encoder.top_layers == ("3", "4", "5")


@pytest.mark.parametrize(
    ("values", "spec"),
    [
        ({"kind": "mlp"}, MIXED),
        ({"kind": "cnn0"}, InputSpec((1, 5, 9))),
        ({"kind": "cnn1"}, InputSpec((1, 13, 14))),
        ({"kind": "resnet50", "last_layer": False}, IMAGE),
        ({"kind": "vgg13"}, FLAT),
        ({"kind": "cnn"}, InputSpec((1, 9, 9), (2,))),
        ({"kind": "cnn"}, FLAT),
        ({"kind": "resnet18"}, FLAT),
        ({"kind": "tabular"}, IMAGE),
        ({"kind": "custom", "factory": "no_such_module_xyz:make"}, FLAT),
        ({"kind": "custom", "factory": "user_models:missing"}, FLAT),
        ({"kind": "custom", "factory": "user_models:number"}, FLAT),
        ({"kind": "custom", "factory": "user_models:fails"}, FLAT),
        ({"kind": "custom", "factory": "user_models:linear", "options": {"x": 1}}, FLAT),
        ({"kind": "custom", "factory": "user_models:linear", "options": {"out": 32}}, FLAT),
        ({"kind": "custom", "factory": "user_models:flat"}, FLAT),
        ({"kind": "custom", "factory": "user_models:pair"}, FLAT),
        ({"kind": "custom", "factory": "user_models:double"}, FLAT),
        ({"kind": "custom", "factory": "user_models:linear", "options": {"wide": 9}}, FLAT),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    values: dict[str, object], spec: InputSpec, user_models: None
) -> None:
    with raises(InputError, Code.MODEL_INVALID):
        build_checked_encoder(settings(values), spec, 6, party="hospital")


def test_a_custom_encoder_takes_its_options(user_models: None) -> None:
    custom = CustomSettings(kind="custom", factory="user_models:linear", options={"out": 6})
    assert build_checked_encoder(custom, FLAT, 6, party="a")(torch.zeros(3, 5)).shape == (3, 6)


@pytest.fixture
def user_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_models.py").write_text(
        """
import torch
from torch import nn

class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
    def forward(self, x):
        return self.f(x)

def linear(spec, size, out=None, wide=0): return nn.Linear(spec.shape[0] + wide, out or size)
def number(spec, size): return 3
def fails(spec, size): raise RuntimeError("no\\nreally")
def flat(spec, size): return Lambda(lambda x: torch.zeros(60))
def pair(spec, size): return Lambda(lambda x: (x, x))
def double(spec, size): return Lambda(lambda x: torch.zeros(2, size).double())
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_models", raising=False)


@pytest.mark.parametrize("of", ["gradient", "loss"])
def test_a_backward_pass_is_torchs(of: str) -> None:
    layer, x_BF, dz_BD = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    given = dz_BD if of == "gradient" else None

    def value() -> torch.Tensor:
        z_BD: torch.Tensor = layer(x_BF)
        return z_BD if of == "gradient" else z_BD.square().mean()

    value().backward(given)
    want = [each.grad for each in layer.parameters()]
    layer.zero_grad()
    backward(value(), given)
    for each, grad in zip(layer.parameters(), want, strict=True):
        assert torch.equal(present(each.grad), present(grad))
    with raises(RuntimeError):
        backward(layer(x_BF), dz_BD[:3])


A = torch.tensor([[1.0, 5.0, 2.0]])
B = torch.tensor([[3.0, 5.0, 0.0]])
WEIGHT = torch.tensor([[1.0, 10.0, 100.0]])


@pytest.mark.parametrize(
    ("rule", "value", "grad_a", "grad_b"),
    [
        ("sum", [[4.0, 10.0, 2.0]], [[1.0, 10.0, 100.0]], [[1.0, 10.0, 100.0]]),
        ("mean", [[2.0, 5.0, 1.0]], [[0.5, 5.0, 50.0]], [[0.5, 5.0, 50.0]]),
        # The tie goes to the first whole.
        ("max", [[3.0, 5.0, 2.0]], [[0.0, 10.0, 100.0]], [[1.0, 0.0, 0.0]]),
    ],
)
def test_combination_and_its_gradient_by_hand(
    rule: str, value: list[list[float]], grad_a: list[list[float]], grad_b: list[list[float]]
) -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    out = combine(rule, [a, b])  # type: ignore[arg-type]
    assert out.tolist() == value
    assert out.shape[1] == combine_widths(rule, [3, 3])  # type: ignore[arg-type]
    (out * WEIGHT).sum().backward()
    assert present(a.grad).tolist() == grad_a
    assert present(b.grad).tolist() == grad_b


@pytest.mark.parametrize("rule", ["concat", "sum", "mean", "max", "attention"])
@pytest.mark.parametrize("own", [True, False])
def test_gradients_of_received_embeddings_are_those_of_autograd_bit_for_bit(
    rule: Combine, own: bool
) -> None:
    x, y, w = (
        torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)
    )
    mine = [w.clone().requires_grad_() * 3] if own else []
    leaves = {"p1": x.clone().requires_grad_(), "p2": y.clone().requires_grad_()}
    combine(rule, [*(each.detach() for each in mine), *leaves.values()]).tanh().sum().backward()

    received = {"p1": x.clone(), "p2": y.clone()}
    combined = CombinedEmbeddings(rule, [*mine, *received.values()], received)
    assert torch.equal(combined.values[0], combine(rule, [*mine, *received.values()]))
    combined.values[0].tanh().sum().backward()
    found = combined.gradients()
    for name, leaf in leaves.items():
        assert torch.equal(found[name], present(leaf.grad))
    assert (found["p1"] is found["p2"]) == (rule in ("sum", "mean"))


@pytest.mark.parametrize("rule", ["concat", "sum", "mean", "max", "attention"])
def test_gradients_are_zeros_if_the_loss_does_not_depend_on_the_embeddings(rule: Combine) -> None:
    received = {"p1": A.clone()}
    assert torch.equal(
        CombinedEmbeddings(rule, [*received.values()], received).gradients()["p1"],
        torch.zeros_like(A),
    )


def test_concatenation_keeps_the_order_and_splits_the_gradient() -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    out = combine("concat", [a, b])
    assert out.tolist() == [[1.0, 5.0, 2.0, 3.0, 5.0, 0.0]]
    assert combine_widths("concat", [3, 4]) == 7
    (out * torch.arange(6.0)).sum().backward()
    assert (present(a.grad).tolist(), present(b.grad).tolist()) == (
        [[0.0, 1.0, 2.0]],
        [[3.0, 4.0, 5.0]],
    )


def test_cnn_stops_pooling_at_one_pixel() -> None:
    encoder = build_encoder(CnnSettings(kind="cnn", channels=(2, 2, 2, 2)), InputSpec((1, 4, 9)), 3)
    # 4x9, 2x4, 1x2.
    assert sum(isinstance(m, nn.MaxPool2d) for m in encoder.children()) == 2
    assert encoder(torch.zeros(2, 1, 4, 9)).shape == (2, 3)


def test_all_bits_of_a_secret_seed_count_and_those_of_the_recipe_draw_as_torch_does() -> None:
    """torch itself takes 32 bits of a seed: two seeds that differ in the others would draw the same
    numbers.
    """
    plain, high = derive_seed(7, "init", "p1", "encoder"), 1 << 40
    assert torch.equal(
        torch.randn(5, generator=generator(plain)),
        torch.randn(5, generator=torch.Generator().manual_seed(plain)),
    )
    assert torch.equal(
        torch.randn(5, generator=generator(3)), torch.randn(5, generator=generator(3 + high))
    )
    one, other = (torch.randn(700, generator=generator(SECRET | each)) for each in (3, 3 + high))
    assert (one == other).sum() < 3
    again = torch.randn(700, generator=generator(SECRET | 3))
    assert torch.equal(one, again)
    assert abs(one.mean().item()) < 0.15
    assert abs(one.std().item() - 1) < 0.1
    with seed_torch(SECRET | 3):
        assert torch.equal(torch.randn(700), one)


def test_what_follows_from_a_secret_seed_is_as_long() -> None:
    root = secret_seed(b"1" * 32)
    derived = [derive_seed(root, "init", name) for name in ("p1", "p2")]
    assert all(SECRET <= each < 1 << 128 for each in (root, *derived))
    assert len({root, *derived, secret_seed(b"2" * 32)}) == 4
    assert all(derive_seed(each, "batches", 1) >= SECRET for each in derived)
    assert derive_seed(7, "init") < 1 << 63
    assert len(np.random.Philox(key=derived[0]).random_raw(3)) == 3
