"""What a phase declares, and the chain through which it leaves: transform -> policy -> codec."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.bundle import Bundle, BundleSpec, DType, Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.base.step_timing import Clock
from vfl_party.data.rows import divide_rows
from vfl_party.outbound import codecs, policies, transforms
from vfl_party.outbound.chain import Chain
from vfl_party.outbound.chains import check_transforms, make_chains
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, f32, i64, noise, u8
from vfl_party.outbound.exchange import Answering
from vfl_party.outbound.filter import NOWHERE, BuiltIns, Filter, Tensors
from vfl_party.outbound.policies import AllowAll
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData

WHERE = "recipe"
UP = Sent(
    Kind.EMBEDDING, {"z": f32("rows", "width"), "count": i64(1)}, noise("gaussian", sigma=0.5)
)
DOWN = Sent(Kind.GRADIENT, {"dz": f32("rows", "width")}, noise("iso", amplifier=1.0))
SWAP = Exchange("embedding", UP, DOWN)


def recipe(**phase: Any) -> Recipe:
    return Recipe.model_validate(cases.recipe(3, phase=phase))


def chains(role: str, exchange: Exchange = SWAP, policy: Any = None, **phase: Any) -> Any:
    return make_chains(recipe(**phase), "splitnn", exchange, role, policy or AllowAll())  # type: ignore[arg-type]


# -- declarations


def test_words_of_shapes_stand_for_sizes() -> None:
    spec = UP.spec(rows=3, width=8)
    assert {name: (each.dtype, each.shape) for name, each in spec.tensors.items()} == {
        "z": (DType.FLOAT32, (3, 8)),
        "count": (DType.INT64, (1,)),
    }
    # One object for equal sizes: what is derived from it is kept by identity.
    assert UP.spec(rows=3, width=8) is spec
    assert str(UP) == "embedding z float32 [rows, width], count int64 [1]"
    many = Sent(Kind.WEIGHTS, {f"w{n}": f32(n) for n in range(4)} | {"seen": u8(1)})
    assert str(many) == "weights: 5 tensors, float32, uint8"


def test_noise_of_nothing_is_no_transform() -> None:
    assert noise("iso", amplifier=0.0) == ()
    assert [use.kind for use in noise("iso", amplifier=0.1)] == ["iso"]


# -- the chain


def test_a_chain_says_what_is_done_in_order() -> None:
    passive = chains("passive", codec="bfloat16")
    assert str(passive.up) == "Gaussian noise (σ = 0.5) -> allow all -> bfloat16"
    # The active party's policy is its own.
    assert str(passive.down) == "iso noise (λ = 1) -> bfloat16"
    assert str(chains("active").down) == "iso noise (λ = 1) -> allow all -> identity"
    server = chains("active", Exchange("weights", UP, UP, asks="server"), codec="bfloat16")
    # The server averages what the phase declares.
    assert "bfloat16" not in str(server.up) + str(server.down)


class Replies:
    """A hub that keeps the last reply."""

    def reply(self, _step: StepKey, replies: Mapping[str, Bundle]) -> None:
        self.last = dict(replies)


@pytest.mark.parametrize("noisy", [False, True])
def test_the_same_tensor_for_two_parties_is_one_bundle_unless_it_changes_on_its_way_out(
    noisy: bool,
) -> None:
    hub, x, other = Replies(), torch.ones(3, 8), torch.zeros(3, 8)
    swap = (
        SWAP
        if noisy
        else Exchange("embedding", UP, Sent(Kind.GRADIENT, {"dz": f32("rows", "width")}))
    )
    connections = SimpleNamespace(link=None, hub=hub, server=None, clock=Clock(), record=None)
    answering = Answering(
        swap, "splitnn", chains("active", swap), connections, torch.device("cpu"), {}
    )
    answering.reply(
        StepKey("splitnn", 0, 0), {"p1": {"dz": x}, "p2": {"dz": x}, "p3": {"dz": other}}
    )
    assert (hub.last["p1"] is hub.last["p2"]) == (not noisy)
    assert hub.last["p1"] is not hub.last["p3"]
    sent = {
        party: torch.frombuffer(bundle.tensors["dz"].data, dtype=torch.float32)
        for party, bundle in hub.last.items()
    }
    assert noisy or (sent["p2"].tolist(), sent["p3"].tolist()) == ([1.0] * 24, [0.0] * 24)
    assert not noisy or not torch.equal(sent["p1"], sent["p2"])


def test_a_transform_may_be_for_one_role_and_leave_tensors_alone() -> None:
    noisy = noise("gaussian", role="active", leave=["mean"], sigma=1.0)
    weights = Exchange(
        "weights", Sent(Kind.WEIGHTS, {"w": f32(4), "mean": f32(4)}, noisy), NOTHING, asks="server"
    )
    given_ = {"w": torch.zeros(4), "mean": torch.zeros(4)}
    sent = chains("active", weights).up.apply(given_)
    assert bool((sent["w"] != 0).all())
    assert torch.equal(sent["mean"], given_["mean"])
    assert chains("passive", weights).up.apply(given_)["w"] is given_["w"]


def test_noise_resumes_from_a_checkpoint() -> None:
    first, second, x = chains("passive"), chains("passive"), {"z": torch.zeros(3, 8)}
    first.up.apply(x)
    state = unpack(*pack(first.state()))
    wanted = [first.up.apply(x)["z"] for _ in range(2)]
    second.load_state(state)
    assert all(torch.equal(second.up.apply(x)["z"], want) for want in wanted)
    plain = Exchange("plain", Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}))
    assert chains("passive", plain).state() is None


def test_a_recipe_adds_transforms_of_its_own() -> None:
    asked = [{"kind": "gaussian", "exchange": "embedding", "sent_by": "active", "sigma": 2.0}]
    found = chains("active", codec="float16", transforms=asked)
    assert str(found.down) == "iso noise (λ = 1) -> Gaussian noise (σ = 2) -> allow all -> float16"
    assert str(found.up) == "Gaussian noise (σ = 0.5) -> float16"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ({"codec": "bfloat61"}, ["codec 'bfloat61'", "Did you mean 'bfloat16'"]),
        (
            {"transforms": [{"kind": "gausian", "exchange": "embedding"}]},
            ["transform 'gausian'", "'gaussian'"],
        ),
        (
            {"transforms": [{"kind": "gaussian", "exchange": "embedding", "sigma": -1}]},
            ["gaussian", "sigma"],
        ),
        (
            {"transforms": [{"kind": "gaussian", "exchange": "embedding", "sgima": 1}]},
            ["'sgima'", "'sigma'"],
        ),
        ({"transforms": [{"kind": "gaussian", "exchange": "embedding"}]}, ["gaussian", "sigma"]),
        (
            {"transforms": [{"kind": "iso", "exchange": "embedding", "amplifier": 0}]},
            ["iso", "amplifier"],
        ),
        (
            {"transforms": [{"kind": "gaussian", "exchange": "z", "sigma": 1}]},
            ["unknown exchange", "'z'", "embedding"],
        ),
        (
            {
                "transforms": [
                    {"kind": "gaussian", "exchange": "validation", "sent_by": "active", "sigma": 1}
                ]
            },
            ["exchange 'validation'", "active parties send nothing", "sent_by"],
        ),
    ],
)
def test_what_a_recipe_asks_for_wrongly_is_one_sentence(
    phase: dict[str, Any], words: list[str]
) -> None:
    given_ = recipe(**phase)
    layer = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 8)})
    party = Party(
        "p1", Course(given_), torch.device("cpu"), dict(layer), PartyData(divide_rows(given_, 100))
    )
    with pytest.raises(InputError) as caught:
        party.course.build(party)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("codec", ["float16", "float61"])
def test_a_codec_of_a_phase_that_exchanges_nothing_is_refused(codec: str) -> None:
    tables = cases.recipe(3) | {"phases": [{"kind": "contrastive", "rounds": 1, "codec": codec}]}
    given_ = Recipe.model_validate(tables)
    party = Party(
        "p0", Course(given_), torch.device("cpu"), {}, PartyData(divide_rows(given_, 100))
    )
    with raises(InputError, Code.CONFIG_INVALID):
        party.course.build(party)


def test_a_codec_of_a_phase_without_float32_is_refused() -> None:
    """Ciphertexts, bits and places are no numbers that a codec writes."""
    tables = cases.recipe(3) | {"phases": [{"kind": "secureboost", "trees": 1, "codec": "float16"}]}
    sums = Exchange(
        "sums", Sent(Kind.GRADIENT, {"ciphertexts": (torch.uint8, (4, 64))}), Sent(Kind.VERDICT, {})
    )
    with raises(InputError, Code.CONFIG_INVALID):
        check_transforms(Recipe.model_validate(tables), {("secureboost", "sums"): sums})


# -- codecs


# {codec: settings}, for codecs that need some. Their coders: test_packing.py.
NEEDED: dict[str, Any] = {"bits": {"bits": 8}, "topk": {"keep": 0.25}, "randtopk": {"keep": 0.25}}


@pytest.mark.parametrize("name", codecs.CODECS)
@given(
    values=st.lists(st.floats(width=32, min_value=-60000, max_value=60000), min_size=1, max_size=20)
)
def test_a_codec_sends_what_its_spec_says_and_comes_near(name: str, values: list[float]) -> None:
    codec = codecs.make(name, WHERE, NEEDED.get(name))
    x: dict[str, Tensor] = {"z": torch.tensor(values), "count": torch.tensor([len(values)])}
    declared = Sent(Kind.EMBEDDING, {"z": f32(len(values)), "count": i64(1)}).spec()
    sent = codec.apply_at(NOWHERE, x)
    assert {key: each.nbytes for key, each in codec.wire_spec(declared).tensors.items()} == {
        key: each.nbytes for key, each in sent.items()
    }
    back = codec.undo_at(NOWHERE, sent, declared)
    assert torch.equal(back["count"], x["count"])
    assert back["z"].dtype is torch.float32
    error, size = (back["z"] - x["z"]).abs(), x["z"].abs()
    assert bool((error <= (size.max() if name in NEEDED else size / 256 + 1e-7)).all())
    # What has been rounded stays.
    assert name in NEEDED or torch.equal(codec.undo(codec.apply(back))["z"], back["z"])


def test_a_number_that_a_codec_cannot_write_is_one_sentence() -> None:
    x = {"z": torch.tensor([1.0, 70000.0])}
    with raises(InputError, Code.NON_FINITE, names=("04", "65504")) as caught:
        codecs.make("float16", WHERE).apply(x)
    assert "70000" not in caught.value.public
    assert codecs.make("bfloat16", WHERE).apply(x)["z"].isfinite().all()
    nan = {"z": torch.tensor([float("nan"), float("inf")])}
    # The receiver says so.
    assert not codecs.make("float16", WHERE).apply(nan)["z"].isfinite().any()


# -- policies


class OnlyEmbeddings(Filter):
    """A policy that lets no gradient out, and no tensor of more than four rows."""

    text = "embeddings of four rows"

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        if exchange.name == "secret" and sent.kind is Kind.EMBEDDING:
            raise InputError(Code.REFUSED, f"{phase}: {exchange.name} may not leave")
        return self

    def apply(self, tensors: Tensors) -> Tensors:
        if any(len(x) > 4 for x in tensors.values()):
            raise VflError(Code.CONFIG_INVALID, "more than four rows may not leave")
        return tensors


def test_a_policy_sees_what_leaves_after_the_transforms_and_may_refuse_it() -> None:
    policy = OnlyEmbeddings()
    with raises(InputError, Code.REFUSED):
        chains("passive", Exchange("secret", UP), policy)
    up = chains("passive", SWAP, policy, codec="bfloat16").up
    assert str(up) == "Gaussian noise (σ = 0.5) -> embeddings of four rows -> bfloat16"
    assert up.apply({"z": torch.zeros(4, 2)})["z"].dtype is torch.bfloat16
    with raises(VflError, Code.CONFIG_INVALID):
        up.apply({"z": torch.zeros(5, 2)})
    # Only what leaves.
    assert chains("active", SWAP, policy).up.undo({"z": torch.zeros(9, 2)})["z"].shape == (9, 2)


def test_a_wire_spec_is_made_once() -> None:
    up = chains("passive", codec="float16").up
    spec = UP.spec(rows=2, width=2)
    found: BundleSpec = up.wire_spec(spec)
    assert found is up.wire_spec(spec)
    assert found.payload_bytes == 2 * 2 * 2 + 8


class Faulty(Filter):
    """A plug-in with a mistake."""

    text = "faulty"

    def __init__(self, settings: Any = None) -> None:
        if settings is None:
            raise TypeError("no settings")

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x / None for name, x in tensors.items()}  # type: ignore[operator]


@pytest.mark.parametrize(
    "made", [Faulty, lambda: 7, 7], ids=["raises", "gives a number", "is no class"]
)
def test_a_faulty_plug_in_is_named_and_no_defect_of_ours(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BuiltIns, "load", lambda *_: made)
    with raises(InputError, Code.CONFIG_INVALID, names="mine") as caught:
        codecs.make("mine", WHERE)
    assert "plug-in" in str(caught.value)
    with raises(InputError, Code.CONFIG_INVALID, names="mine"):
        policies.load("mine", WHERE)


def test_what_is_neither_a_transform_nor_a_function_is_no_transform(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A class of Filter, and a function, serve as they are: ``test_given_plugins.py``."""
    for made in (7, Rounds, "text"):
        monkeypatch.setattr(BuiltIns, "load", lambda *_, made=made: made)
        with raises(InputError, Code.CONFIG_INVALID, names="mine"):
            transforms.load("mine", WHERE)


class Rounds:
    """No filter."""


class Odd(Filter):
    """A plug-in with other mistakes."""

    text = "odd"

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: x[:, 1:] for name, x in tensors.items()}

    def undo(self, tensors: Tensors) -> Tensors:
        return None  # type: ignore[return-value]


class Silent(Filter):
    text = "silent"

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        return None  # type: ignore[return-value]


def test_a_filter_that_sends_other_tensors_than_it_declares_is_named_by_its_own_party() -> None:
    chain, z = Chain([Odd()]), {"z": torch.zeros(4, 8)}
    for _ in range(2):
        with raises(InputError, Code.CONFIG_INVALID):
            chain.apply(z)
    with raises(InputError, Code.CONFIG_INVALID):
        chain.undo(z)
    with raises(InputError, Code.CONFIG_INVALID):
        Chain([Silent()]).wire_spec(BundleSpec(Kind.EMBEDDING, {}))


def test_an_encoder_whose_embeddings_change_their_shape_is_named() -> None:
    class Odd(torch.nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return {1: x, 2: x[1:], 3: x[:, 1:]}.get(self.calls, [x])

    recipe = Recipe.model_validate(cases.recipe(2))
    party = Party(
        "p1",
        Course(recipe),
        torch.device("cpu"),
        {"encoder": Odd()},
        PartyData(divide_rows(recipe, 100)),
    )
    assert party.encode(torch.zeros(4, 8)).shape == (4, 8)
    for what in ("shape [3, 8]", "shape [4, 7]", "a list"):
        with pytest.raises(InputError) as caught:
            party.encode(torch.zeros(4, 8))
        said = f"the encoder of p1: must give a tensor of shape [4, 8] for 4 rows (got {what}). Correct the encoder."
        assert (str(caught.value), caught.value.code) == (said, Code.MODEL_INVALID)


def test_a_filter_that_fails_while_it_is_applied_is_named() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("Tensor", "NoneType")):
        Chain([Faulty(settings=1)]).apply({"z": torch.zeros(2)})


def test_a_policy_that_gives_no_filter_is_named() -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        chains("passive", SWAP, lambda *_: 7)
    with raises(InputError, Code.CONFIG_INVALID, names="test_chain"):
        chains("passive", SWAP, lambda *_: 1 / 0)
