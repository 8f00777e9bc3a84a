"""The tables of ``wire``: which one holds, what is refused, what crosses, and what a stranger's
values do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.bundle import DType, Kind, StepKey
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.packing.coders import PLAIN, Bits, Coding, TopK
from vfl_party.base.checkpoint import pack, unpack
from vfl_party.base.step_timing import Clock
from vfl_party.data.rows import divide_rows
from vfl_party.outbound import codecs
from vfl_party.outbound.chain import Chain
from vfl_party.outbound.chains import coding_of, make_chains
from vfl_party.outbound.declared import Exchange, Sent, f32, i64, u8
from vfl_party.outbound.exchange import Answering, Asking, to_bundle, to_tensors
from vfl_party.outbound.filter import Filter, Passage, Tensors
from vfl_party.outbound.policies import AllowAll
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData

CPU = torch.device("cpu")
STEP = StepKey("splitnn", 2, 5)
SWAP = Exchange(
    "embedding",
    Sent(Kind.EMBEDDING, {"z": f32("rows", "width"), "seen": i64(1)}),
    Sent(Kind.GRADIENT, {"dz": f32("rows", "width")}),
)
SCORES = Exchange("validation", Sent(Kind.EMBEDDING, {"z": f32("rows", "width")}))
MEAN = Exchange(
    "weights",
    Sent(Kind.WEIGHTS, {"w": f32(9, 7)}),
    Sent(Kind.WEIGHTS, {"w": f32(9, 7)}),
    asks="server",
)
BITS = {"codec": "bits", "bits": 4}


def recipe(*wire: dict[str, Any], **phase: Any) -> Recipe:
    return parse(Recipe, cases.recipe(3, phase=phase) | {"wire": list(wire)}, "recipe")


def chains(
    given: Recipe, exchange: Exchange = SWAP, phase: str = "splitnn", role: Any = "passive"
) -> Any:
    return make_chains(
        given, phase, exchange, role, AllowAll(), "p1" if role == "passive" else "p0"
    )


# -- which table holds


def test_the_most_specific_table_holds() -> None:
    given = recipe(
        {"codec": "bits", "bits": 8},
        {"codec": "bits", "bits": 4, "exchange": "embedding"},
        {"codec": "bits", "bits": 2, "phase": "splitnn"},
        {
            "codec": "topk",
            "keep": 0.5,
            "phase": "splitnn",
            "exchange": "embedding",
            "direction": "down",
        },
        {"codec": "identity", "direction": "up"},
    )
    found = chains(given)
    # The phase goes before the exchange.
    assert str(found.up) == "allow all -> 2 bits (stochastic)"
    assert str(found.down) == "top-k (keep 0.5)"
    assert str(chains(given, SCORES).up) == "allow all -> 2 bits (stochastic)"
    other = recipe({"codec": "bits", "bits": 8}, {"codec": "float16", "direction": "down"})
    assert str(chains(other).up) == "allow all -> 8 bits (stochastic)"
    assert str(chains(other).down) == "float16"


def test_the_codec_of_a_phase_is_a_table_that_names_it() -> None:
    given = recipe({"codec": "bits", "bits": 8}, {**BITS, "exchange": "embedding"}, codec="float16")
    assert str(chains(given).up) == "allow all -> float16"
    given = recipe({**BITS, "phase": "splitnn", "direction": "up"}, codec="float16")
    assert (str(chains(given).up), str(chains(given).down)) == (
        "allow all -> 4 bits (stochastic)",
        "float16",
    )


def test_averages_and_what_is_no_phase_are_left_alone() -> None:
    given = recipe(BITS)
    assert str(chains(given, MEAN).up) == "allow all"
    assert coding_of(given, "splitnn", MEAN, "up") == PLAIN
    assert str(chains(given, phase="predict").up) == "allow all"
    assert str(chains(given, phase="open").up) == "allow all"
    named = recipe(
        {**BITS, "exchange": "weights", "direction": "up"},
        {"codec": "float16", "exchange": "weights"},
    )
    assert str(chains(named, MEAN).up) == "allow all -> 4 bits (stochastic)"
    up, down = (coding_of(named, "splitnn", MEAN, way) for way in ("up", "down"))
    assert (up.name, up.bits, up.stochastic, bool(up.seed)) == ("bits", 4, True, True)
    same = coding_of(recipe({**BITS, "bits": 4.0, "exchange": "weights"}), "splitnn", MEAN, "up")
    assert (same.bits, type(same.bits)) == (4, int)
    assert down == Coding("float16")


def test_a_recipe_without_tables_has_the_digest_that_it_had() -> None:
    plain = Recipe.model_validate(cases.recipe(3))
    assert plain.digest() == recipe().digest()
    assert "wire" not in plain.canonical_json()
    assert recipe(BITS).digest() != plain.digest()


# -- what is refused


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (
            [{"codec": "bist", "bits": 4}],
            ["table 1", "unknown codec 'bist'", "Did you mean 'bits'"],
        ),
        ([{"codec": "bits"}], ["table 1", "bits: missing"]),
        ([{"codec": "bits", "bits": 3}], ["bits: must be 8, 4 or 2", "got 3"]),
        (
            [{"codec": "bits", "bits": 4, "scales": "float16"}],
            ["scales: must be 'float32' or 'bfloat16'"],
        ),
        ([{**BITS, "roundign": "nearest"}], ["'roundign'", "'rounding'"]),
        ([{**BITS, "rounding": "up"}], ["rounding", "'up'"]),
        ([{**BITS, "exchnage": "embedding"}], ["wire.0", "'exchnage'", "did you mean 'exchange'"]),
        ([{"bits": 4}], ["wire.0.codec", "missing"]),
        ([{"codec": "float16", "bits": 4}], ["codec 'float16' has no settings", "'bits'"]),
        ([{"codec": "topk", "keep": 1.5}], ["keep", "a share between 0 and 1"]),
        ([{"codec": "topk", "keep": 0}], ["keep", "a positive integer"]),
        ([{"codec": "randtopk", "keep": 2, "alpha": 1.0}], ["alpha", "less than 1"]),
        ([{**BITS, "phase": "splitn"}], ["table 1", "no phase 'splitn'", "'splitnn'"]),
        (
            [BITS, {**BITS, "exchange": "embeding"}],
            ["table 2", "unknown exchange 'embeding'", "'embedding'"],
        ),
        (
            [{**BITS, "exchange": "validation", "direction": "down"}],
            ["validation carries no float32", "down"],
        ),
        (
            [BITS, {"codec": "float16"}],
            ["table 2", "another table", "the same phase, exchange and direction"],
        ),
        (
            [{**BITS, "direction": "up"}, {"codec": "float16", "phase": "splitnn"}],
            ["table 1", "never applies", "table 2 takes precedence"],
        ),
        (
            [
                BITS,
                {"codec": "float16", "exchange": "embedding"},
                {"codec": "bfloat16", "exchange": "validation"},
            ],
            ["table 1", "never applies"],
        ),
        ([{**BITS, "direction": "sideways"}], ["direction", "'up' or 'down'"]),
        ([{**BITS, "error_feedback": True}], ["error_feedback", "that the server averages"]),
    ],
)
def test_a_wrong_table_is_one_sentence(wire: list[dict[str, Any]], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        built(recipe(*wire))
    assert "\n" not in str(caught.value)
    assert caught.value.code is Code.CONFIG_INVALID
    assert all(word in str(caught.value) for word in words), str(caught.value)


def built(given: Recipe) -> None:
    layer = torch.nn.ModuleDict({"encoder": torch.nn.Linear(4, 8)})
    party = Party("p1", Course(given), CPU, dict(layer), PartyData(divide_rows(given, 100)))
    party.course.build(party)


def test_a_codec_with_settings_is_no_key_of_a_phase() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("bits", "splitnn")):
        chains(recipe(codec="bits"))


def test_a_table_beside_the_codec_of_its_phase_is_refused() -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        recipe({**BITS, "phase": "splitnn"}, codec="float16")


@pytest.mark.parametrize(
    "wire",
    [
        {"codec": "topk", "keep": 3, "exchange": "weights"},
        {**BITS, "scales": "bfloat16", "exchange": "weights"},
        {**BITS, "error_feedback": True, "exchange": "weights"},
    ],
)
def test_what_the_server_cannot_read_is_refused(wire: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        chains(recipe(wire), MEAN)


# -- what crosses


def passing(codec: dict[str, Any], **more: Any) -> tuple[Any, Recipe]:
    given = recipe({**codec, **more})
    return chains(given), given


def test_a_step_that_is_repeated_gives_the_same_bytes() -> None:
    found, given = passing(BITS)
    z = {"z": torch.randn(6, 33), "seen": torch.tensor([3])}
    at = Passage(STEP, "p1", "p0")
    first, again = found.up.apply(z, at), chains(given).up.apply(z, at)
    assert list(first) == ["z.packed", "z.low", "z.scale", "seen"]
    assert all(torch.equal(first[name], again[name]) for name in first)
    others = [
        Passage(STEP._replace(batch=6), "p1", "p0"),
        Passage(STEP._replace(round=3), "p1", "p0"),
        Passage(STEP, "p2", "p0"),
    ]
    for other in others:
        assert not torch.equal(first["z.packed"], found.up.apply(z, other)["z.packed"])
    down = found.down.apply({"dz": z["z"]}, at)
    assert not torch.equal(first["z.packed"], down["dz.packed"])
    seeded = make_chains(
        Recipe.model_validate(cases.recipe(3, seed=8) | {"wire": [BITS]}),
        "splitnn",
        SWAP,
        "passive",
        AllowAll(),
    )
    assert not torch.equal(first["z.packed"], seeded.up.apply(z, at)["z.packed"])


@pytest.mark.parametrize(
    "codec", [BITS, {"codec": "topk", "keep": 0.2}, {"codec": "randtopk", "keep": 4}]
)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_what_crosses_is_what_the_spec_says(codec: dict[str, Any], rows: int) -> None:
    found, _ = passing(codec)
    spec = SWAP.up.spec(rows=rows, width=33)
    z = {"z": torch.randn(rows, 33), "seen": torch.tensor([3])}
    sent = to_bundle(Kind.EMBEDDING, found.up.apply(z, Passage(STEP, "p1", "p0")))
    wire = found.up.wire_spec(spec)
    assert {name: (each.dtype, each.shape) for name, each in sent.tensors.items()} == {
        name: (each.dtype, each.shape) for name, each in wire.tensors.items()
    }
    assert sent.payload_bytes == wire.payload_bytes
    assert rows == 0 or wire.payload_bytes < spec.payload_bytes
    got = found.up.undo(to_tensors(sent, CPU), Passage(STEP, "p1", "p0"), spec)
    assert torch.equal(got["seen"], z["seen"])
    assert (got["z"].dtype, got["z"].shape) == (torch.float32, (rows, 33))


def test_random_top_k_draws_in_training_only() -> None:
    given = recipe({"codec": "randtopk", "keep": 4})
    assert "random top-k (keep 4, alpha 0.1)" in str(chains(given).up)
    assert str(chains(given, SCORES).up) == "allow all -> top-k (keep 4)"


def test_a_gradient_for_all_is_written_once() -> None:
    hub, given = SimpleNamespace(), recipe(BITS)
    hub.reply = lambda _step, replies: setattr(hub, "last", replies)
    found = chains(given, role="active")
    answering = Answering(
        SWAP,
        "splitnn",
        found,
        SimpleNamespace(link=None, hub=hub, server=None, clock=Clock(), record=None),
        CPU,
        {},
    )
    one, other = torch.randn(3, 9), torch.randn(3, 9)
    answering.reply(STEP, {"p1": {"dz": one}, "p2": {"dz": one}, "p3": {"dz": other}})
    assert hub.last["p1"] is hub.last["p2"]
    assert hub.last["p1"] is not hub.last["p3"]


def test_names_that_would_be_one_on_the_wire_are_refused() -> None:
    sent = Sent(Kind.EMBEDDING, {"z": f32(4, 9), "z.low": u8(4)})
    with raises(InputError, Code.CONFIG_INVALID, names="z.low"):
        chains(recipe(BITS), Exchange("embedding", sent)).up.wire_spec(sent.spec())


@pytest.mark.parametrize(
    "codec", [BITS, {"codec": "topk", "keep": 2}, {"codec": "randtopk", "keep": 2}]
)
def test_a_sender_says_that_a_number_is_not_finite(codec: dict[str, Any]) -> None:
    found, _ = passing(codec)
    z = torch.randn(4, 9)
    z[2, 3] = float("nan")
    with raises(InputError, Code.NON_FINITE):
        found.up.apply({"z": z, "seen": torch.tensor([1])}, Passage(STEP, "p1", "p0"))


def test_a_filter_that_knows_only_apply_and_undo_is_one_still() -> None:
    class Twice(Filter):
        text = "twice"

        def apply(self, tensors: Tensors) -> Tensors:
            return {name: 2 * x for name, x in tensors.items()}

        def undo(self, tensors: Tensors) -> Tensors:
            return {name: x / 2 for name, x in tensors.items()}

    chain, x = Chain([Twice()], codecs.make("bits", "here", {"bits": 8})), {"z": torch.randn(3, 40)}
    spec = SCORES.up.spec(rows=3, width=40)
    at = Passage(STEP, "p1", "p0")
    got = chain.undo(dict(chain.apply(x, at)), at, spec)["z"]
    assert (got - x["z"]).abs().max() < 0.05
    assert chain.before_codec(spec).tensors["z"].dtype is DType.FLOAT32


# -- error feedback


def test_error_feedback_sends_later_what_it_left_out_and_resumes() -> None:
    given = recipe(
        {
            **BITS,
            "rounding": "nearest",
            "exchange": "weights",
            "direction": "up",
            "error_feedback": True,
        }
    )
    spec, w = MEAN.up.spec(), {"w": torch.rand(9, 7)}

    def rounds(found: Any, first: int, n: int) -> list[torch.Tensor]:
        steps = [
            Passage(StepKey("splitnn", round_, 0), "p1", "server")
            for round_ in range(first, first + n)
        ]
        return [found.up.undo(dict(found.up.apply(w, at)), at, spec)["w"] for at in steps]

    found = chains(given, MEAN)
    assert "4 bits (nearest, error feedback)" in str(found.up)
    read = rounds(found, 0, 30)
    once = (read[0] - w["w"]).abs().max()
    assert (torch.stack(read).mean(dim=0) - w["w"]).abs().max() < once / 5
    # No variance below zero.
    assert all(bool((each >= w["w"].min(dim=1, keepdim=True).values).all()) for each in read)
    other = chains(given, MEAN)
    rounds(other, 0, 10)
    resumed = chains(given, MEAN)
    resumed.load_state(unpack(*pack(other.state())))
    assert all(torch.equal(*pair) for pair in zip(rounds(resumed, 10, 5), read[10:15], strict=True))
    assert not torch.equal(rounds(chains(given, MEAN), 10, 1)[0], read[10])


# -- strangers


def arriving(codec: dict[str, Any], **changed: Any) -> dict[str, torch.Tensor]:
    """What the active party reads of p1 if p1's bundle has other values in some tensors."""
    given = recipe(codec)
    found, z = chains(given, SCORES), {"z": torch.randn(4, 9)}
    sent = dict(found.up.apply(z, Passage(STEP, "p1", "p0")))
    for name, value in changed.items():
        sent[f"z.{name}"] = value
    hub = SimpleNamespace(
        collect=lambda _step, _spec, arrived, *_: (
            arrived("p1", to_bundle(Kind.EMBEDDING, sent)) or ["p1"]
        )
    )
    connections = SimpleNamespace(link=None, hub=hub, server=None, clock=Clock(), record=None)
    active = Answering(
        SCORES, "splitnn", chains(given, SCORES, role="active"), connections, CPU, {"width": 9}
    )
    return active.collect(STEP, rows=4)["p1"]


TOP2 = {"codec": "topk", "keep": 2}


@pytest.mark.parametrize(
    ("codec", "changed", "code"),
    [
        (BITS, {"scale": torch.tensor([1.0, -1, 1, 1])}, Code.MALFORMED_MESSAGE),
        (BITS, {"scale": torch.tensor([1.0, 3e38, 1, 1])}, Code.MALFORMED_MESSAGE),
        (BITS, {"low": torch.tensor([float("nan")] * 4)}, Code.NON_FINITE),
        (BITS, {"scale": torch.tensor([float("inf")] * 4)}, Code.NON_FINITE),
        (TOP2, {"index": torch.full((4, 1), 0xFF, dtype=torch.uint8)}, Code.MALFORMED_MESSAGE),
        (TOP2, {"index": torch.zeros(4, 1, dtype=torch.uint8)}, Code.MALFORMED_MESSAGE),
        (TOP2, {"value": torch.full((4, 2), float("inf"))}, Code.NON_FINITE),
    ],
)
def test_values_of_a_stranger_are_one_error(
    codec: dict[str, Any], changed: dict[str, Any], code: Code
) -> None:
    with raises(PeerError, code, names="p1", party="p1"):
        arriving(codec, **changed)
    arriving(codec)


def test_a_reply_is_checked_as_well() -> None:
    given = recipe(BITS)
    spec, dz = SWAP.down.spec(rows=4, width=9), {"dz": torch.randn(4, 9)}
    sent = dict(chains(given, role="active").down.apply(dz, Passage(STEP, "p0", "p1")))
    sent["dz.scale"] = -sent["dz.scale"]
    link = SimpleNamespace(receive=lambda _step, _spec: to_bundle(Kind.GRADIENT, sent))
    asking = Asking(
        SWAP,
        "splitnn",
        chains(given),
        SimpleNamespace(link=link, server=None, hub=None, clock=Clock(), record=None),
        "p0",
        CPU,
        {},
    )
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("dz", "p0")):
        asking.receive(STEP, rows=4, width=9)
    assert spec.payload_bytes == 144


def test_coders_say_what_they_are() -> None:
    assert [each.text for each in (Bits(2, False), TopK(0.25), TopK(3, 0.1, True))] == [
        "2 bits (nearest)",
        "top-k (keep 0.25)",
        "random top-k (keep 3, alpha 0.1, float16)",
    ]
